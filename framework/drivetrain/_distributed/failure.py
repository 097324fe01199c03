"""Failure: the report of a rank that failed, and the errors that are raised for this failure."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Self

from drivetrain.errors import DistributedError

# Types and texts of the errors that gloo, NCCL, the store and drivetrain raise when another rank has ended or does not
# answer.
_PEER_ERRORS = ("RankFailedError", "DistNetworkError", "DistStoreError")
_PEER_MESSAGES = (
    "Connection closed by",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "communicator was aborted",
    "remote process exited",
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A report of how a rank failed.

    Attributes:
        rank: the global rank.
        exit_code: the exit code of the rank's process. It is negative for a signal, and None if it is not known yet.
        error_type: the exception's qualified name, or None if there was no exception.
        message: the exception's text, or another description.
        traceback: the formatted traceback with its causes, or "".
        pickled_error: the pickled exception, if it can be pickled. It is only passed through pipes to the process that
            started the rank. `encode` omits the pickle, so it never passes a store or a file.
        time_ns: the time of the failure by the machine's clock. The earliest failure usually causes the others.
    """

    rank: int
    exit_code: int | None = None
    error_type: str | None = None
    message: str = ""
    traceback: str = ""
    time_ns: int = field(default_factory=time.time_ns)
    pickled_error: bytes | None = field(default=None, repr=False)

    @classmethod
    def of_exception(cls, rank: int, error: BaseException) -> Self:
        """Create the report of an exception that is being handled on ``rank``."""
        error_class = type(error)
        module, name = error_class.__module__, error_class.__qualname__
        text = "".join(traceback.format_exception(error))
        error_type = name if module == "builtins" else f"{module}.{name}"
        return cls(rank=rank, error_type=error_type, message=str(error), traceback=text, pickled_error=_dump(error))

    @classmethod
    def of_exit(cls, rank: int, exit_code: int) -> Self:
        """Create the report of a process that ended without an exception."""
        failure = cls(rank, exit_code)
        name = failure.signal_name
        return replace(failure, message=f"killed by {name}" if name else f"ended with exit code {exit_code}")

    @property
    def signal_name(self) -> str | None:
        """The name of the signal that ended the process, such as "SIGKILL", or None."""
        if self.exit_code is None or self.exit_code >= 0:
            return None
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"

    @property
    def distance(self) -> int:
        """The distance of the failure from the cause, from 0 to 2.

        A distance of 0 means that the failure is a cause. 1 means that drivetrain reports ranks that did not arrive or
        made another call. 2 means that the failure only reports a lost connection or the failure of another rank.
        """
        if self.error_type is None:
            return 0
        if self.error_type.endswith(_PEER_ERRORS):
            return 2
        # Errors of other libraries have such texts too, if a connection of the user's code fails.
        is_own = self.error_type == "RuntimeError" or self.error_type.startswith(("torch.", "drivetrain."))
        if is_own and any(text in self.message for text in _PEER_MESSAGES):
            return 2
        return 1 if self.error_type.endswith("DistributedError") else 0

    @property
    def process_exit_code(self) -> int:
        """The exit code of a process that ends because of this failure. As in a shell, signal n gives 128 + n."""
        code = self.exit_code
        return 1 if not code else code if code > 0 else 128 - code

    def is_same_error(self, other: Failure) -> bool:
        """Return True if both failures report the same error, raised at the same line."""
        return (self.error_type, self.message, _raised_at(self)) == (other.error_type, other.message, _raised_at(other))

    def load_error(self) -> BaseException | None:
        """Return the exception itself, or None if the exception could not be pickled or unpickled."""
        if self.pickled_error is None:
            return None
        try:
            error = pickle.loads(self.pickled_error)
        except Exception:
            return None
        return error if isinstance(error, BaseException) else None

    def encode(self) -> str:
        """Return the failure as text for a store, without the pickled exception.

        Any process that can reach the port of a store can write to the store, so a store must not hold pickles.
        """
        return json.dumps(asdict(replace(self, pickled_error=None)))

    @classmethod
    def decode(cls, text: str | bytes) -> Self:
        """Return the failure from the result of `encode`. An inserted pickle is dropped without being loaded."""
        return replace(cls(**json.loads(text)), pickled_error=None)

    def write(self, path: str) -> None:
        """Write the failure, without the pickled exception, to a file. An existing file is kept."""
        if not os.path.exists(path):
            Path(path).write_text(self.encode())

    @classmethod
    def read(cls, path: str) -> Self | None:
        """Return the failure that `write` stored, or None if there is no file or it is not complete."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return cls.decode(Path(path).read_text())
        return None

    def describe(self) -> str:
        """Return the rank and its error as text, which has one line unless the message of the error has several."""
        if self.error_type is not None:
            return f"Rank {self.rank} failed with {self.error_type}: {self.message}"
        return f"Rank {self.rank} was {self.message}" if self.signal_name else f"Rank {self.rank} {self.message}"

    def frames(self) -> str:
        """Return the traceback without the error's text at its end, and without its heading if there are no causes."""
        causes, heading, last = self.traceback.rpartition("Traceback (most recent call last):\n")
        frames = "\n".join(takewhile(lambda line: line.startswith(" "), last.splitlines()))
        return f"{causes}{heading}{frames}" if causes else frames

    def one_line_summary(self) -> str:
        """Return the first line of `describe`."""
        return self.describe().partition("\n")[0]


def _raised_at(failure: Failure) -> str:
    """Return the line of the last frame in the traceback, or "" if there is no traceback."""
    return next((line for line in reversed(failure.traceback.splitlines()) if line.startswith("  File ")), "")


class RankFailedError(DistributedError):
    """Another rank failed. `failure` describes which rank, and how."""

    def __init__(self, failure: Failure) -> None:
        why = f"its traceback:\n{failure.traceback.rstrip()}" if failure.traceback else ""
        fix = "" if failure.error_type else "see what the rank printed before it ended"
        super().__init__(failure.describe(), why, fix)
        self.failure = failure

    def __reduce__(self) -> tuple[type[RankFailedError], tuple[Failure]]:
        return type(self), (self.failure,)


class AbsentRanksError(DistributedError):
    """Ranks did not arrive in time but answered with their stacks, so they will send no further report."""


def failure_file(error_file: str) -> str:
    """Return the path of a process's `Failure`, next to the error file that its launcher has chosen."""
    return f"{error_file}.failure"


def first_cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others.

    The failure with the smallest `Failure.distance` counts as the cause, and the earliest one among equal distances. A
    rank may report a lost or silent peer before the failure of that peer is detected.
    """
    return min(failures, key=lambda failure: (failure.distance, failure.time_ns))


def error_of(failures: Sequence[Failure], world_size: int) -> BaseException:
    """Return the error to raise for the failures of ranks.

    If all ranks raised the same error and it can be unpickled, the result is this error with a note of the traceback.
    """
    cause = first_cause(failures)
    differs = len({(failure.error_type, failure.message) for failure in failures}) > 1
    original = None if differs or len(failures) < world_size else cause.load_error()
    if original is None:
        return RankFailedError(cause)
    # A cause would be printed with the error's text again, and below it the frames of this process.
    original.add_note(f"Traceback of rank {cause.rank}:\n{cause.frames()}")
    return original


def _dump(error: BaseException) -> bytes | None:
    try:
        return pickle.dumps(error)
    except Exception:
        return None
