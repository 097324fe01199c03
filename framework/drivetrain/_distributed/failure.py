"""A rank that failed: what is known of it, and the error that tells the user."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

from drivetrain.errors import DistributedError

# What gloo, NCCL, the store and we say where another rank is gone or does not answer.
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
    """How one rank ended that should not have.

    Attributes:
        rank: the global rank.
        exit_code: of its process; negative for a signal, None where it is not known (yet).
        signal_name: "SIGKILL", ..., or None.
        error_type: the exception's qualified name, or None where it left no exception.
        message: the exception's text, or what is known in its place.
        traceback: the formatted traceback, with its causes, or "".
        pickled_error: the exception itself, pickled and in base 85, where it can be. It goes through files that only
            this user can write, never through a store: `encode` leaves it out.
        time_ns: when, by the machine's clock: the first failure is the cause, others often only follow from it.
    """

    rank: int
    exit_code: int | None = None
    signal_name: str | None = None
    error_type: str | None = None
    message: str = ""
    traceback: str = ""
    time_ns: int = field(default_factory=time.time_ns)
    pickled_error: str | None = field(default=None, repr=False)

    @classmethod
    def of_exception(cls, rank: int, error: BaseException) -> Self:
        """Describe an exception that is being handled on ``rank``."""
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        text = "".join(traceback.format_exception(error))
        return cls(rank=rank, error_type=name, message=str(error), traceback=text, pickled_error=_dump(error))

    @classmethod
    def of_exit(cls, rank: int, exit_code: int, stacks: str = "") -> Self:
        """Describe a process that ended without leaving an exception, with the stacks that it left if it did."""
        name = signal_name(exit_code)
        message = f"killed by {name}" if name else f"ended with exit code {exit_code}"
        return cls(rank=rank, exit_code=exit_code, signal_name=name, message=message, traceback=stacks)

    @property
    def distance(self) -> int:
        """How far it is from the cause.

        0 is a cause itself; 1 is our own account of ranks that did not come, or came for something else; 2 only tells
        of a lost connection or of another rank's failure.
        """
        if self.error_type is None:
            return 0
        if self.error_type.endswith(_PEER_ERRORS) or any(text in self.message for text in _PEER_MESSAGES):
            return 2
        return 1 if self.error_type.endswith("DistributedError") else 0

    @property
    def process_exit_code(self) -> int:
        """The code with which a process ends that ends for this: as a shell would, 128 + n for signal n."""
        code = self.exit_code
        return 1 if not code else code if code > 0 else 128 - code

    def is_like(self, other: Failure) -> bool:
        """Whether both are the same error, raised in the same place of the code."""
        return (self.error_type, self.message, _raised_at(self)) == (other.error_type, other.message, _raised_at(other))

    def load_error(self) -> BaseException | None:
        """Return the exception itself, or None where it could not be brought over."""
        if self.pickled_error is None:
            return None
        try:
            error = pickle.loads(base64.b85decode(self.pickled_error))
        except Exception:
            return None
        return error if isinstance(error, BaseException) else None

    def ended_with(self, exit_code: int) -> Self:
        """Return the same failure, with the exit code of its process."""
        return replace(self, exit_code=exit_code, signal_name=signal_name(exit_code))

    def encode(self) -> str:
        """Return the failure as text for a store, into which anybody may write who reaches its port."""
        return json.dumps(asdict(replace(self, pickled_error=None)))

    @classmethod
    def decode(cls, text: str | bytes) -> Self:
        """Return the failure that `encode` gave; a pickle that somebody else has put into it is dropped unread."""
        return replace(cls(**json.loads(text)), pickled_error=None)

    def write(self, path: str) -> None:
        """Leave the failure in a file for the process that started this one. The first one stands.

        Args:
            path: in a folder that only this user can write to, since the exception in it will be unpickled.
        """
        if os.path.exists(path):
            return
        # Whoever started us reads as soon as the file is there.
        Path(f"{path}.part").write_text(json.dumps(asdict(self)))
        os.replace(f"{path}.part", path)

    @classmethod
    def read(cls, path: str) -> Self | None:
        """Return the failure that `write` left, or None."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return cls(**json.loads(Path(path).read_text()))
        return None

    def describe(self) -> str:
        """One line: the rank and what happened to it."""
        if self.error_type is not None:
            return f"Rank {self.rank} failed with {self.error_type}: {self.message}"
        return f"Rank {self.rank} was {self.message}" if self.signal_name else f"Rank {self.rank} {self.message}"

    def in_a_line(self) -> str:
        """`describe`, at its shortest; with what to do where the rank itself could print nothing."""
        first = (self.describe().splitlines() or [""])[0]
        return first if self.error_type is not None else f"{first}; {_fix(self)}"


def _raised_at(failure: Failure) -> str:
    """Return the traceback's last frame, or "" where there is none."""
    return next((line for line in reversed(failure.traceback.splitlines()) if line.startswith("  File ")), "")


class RankFailedError(DistributedError):
    """A rank other than the caller's failed. `failure` says which and how."""

    def __init__(self, failure: Failure) -> None:
        why = f"its traceback:\n{failure.traceback.rstrip()}" if failure.traceback else ""
        fix = "" if failure.error_type else _fix(failure)
        super().__init__(failure.describe(), why, fix)
        self.failure = failure

    def __reduce__(self) -> tuple[type[RankFailedError], tuple[Failure]]:
        return type(self), (self.failure,)


class AbsentRanksError(DistributedError):
    """Ranks did not come in time, and have told where they are: there is nothing more to hear of them."""


def failure_file(error_file: str) -> str:
    """Return where a process leaves its `Failure`, beside the error file that elastic has chosen for it."""
    return f"{error_file}.failure"


def signal_name(exit_code: int | None) -> str | None:
    """Return the name of the signal that an exit code below zero stands for, else None."""
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def first_cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that the others follow from.

    What happened first comes first, but an error that only tells of a lost or silent peer comes after all others: it
    may well be reported before that peer's own end is noticed.
    """
    return min(failures, key=lambda failure: (failure.distance, failure.time_ns))


def _dump(error: BaseException) -> str | None:
    try:
        return base64.b85encode(pickle.dumps(error)).decode()
    except Exception:
        return None


def _fix(failure: Failure) -> str:
    if failure.signal_name == "SIGKILL":
        return "SIGKILL comes from outside; most often the kernel's out-of-memory killer (see `dmesg`) or a scheduler"
    return "see what the rank printed before it ended"
