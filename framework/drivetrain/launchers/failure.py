"""A rank that failed: what is known of it, and the error that tells the user."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from drivetrain.errors import DistributedError


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
        time_ns: when, by the machine's clock: the first failure is the cause, others often only follow from it.
    """

    rank: int
    exit_code: int | None = None
    signal_name: str | None = None
    error_type: str | None = None
    message: str = ""
    traceback: str = ""
    time_ns: int = field(default_factory=time.time_ns)

    @classmethod
    def of_exception(cls, rank: int, error: BaseException) -> Self:
        """Describe an exception that is being handled on ``rank``."""
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        text = "".join(traceback.format_exception(error))
        return cls(rank=rank, error_type=name, message=str(error), traceback=text)

    @classmethod
    def of_exit(cls, rank: int, exit_code: int) -> Self:
        """Describe a process that ended without leaving an exception."""
        name = signal_name(exit_code)
        message = f"killed by {name}" if name else f"ended with exit code {exit_code}"
        return cls(rank=rank, exit_code=exit_code, signal_name=name, message=message)

    def describe(self) -> str:
        """One line: the rank and what happened to it."""
        if self.error_type is not None:
            return f"Rank {self.rank} failed with {self.error_type}: {self.message}"
        return f"Rank {self.rank} was {self.message}" if self.signal_name else f"Rank {self.rank} {self.message}"


class RankFailedError(DistributedError):
    """A rank other than the caller's failed. `failure` says which and how."""

    def __init__(self, failure: Failure) -> None:
        why = f"its traceback:\n{failure.traceback.rstrip()}" if failure.traceback else ""
        fix = "" if failure.error_type else _fix(failure)
        super().__init__(failure.describe(), why, fix)
        self.failure = failure

    def __reduce__(self) -> tuple[type[RankFailedError], tuple[Failure]]:
        return type(self), (self.failure,)


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

    A process that a signal killed comes first: what its peers raise then (a closed connection) may be reported
    before its death is noticed. After that the earliest counts.
    """
    return min(failures, key=lambda failure: (failure.signal_name is None, failure.time_ns))


def _fix(failure: Failure) -> str:
    if failure.signal_name == "SIGKILL":
        return "SIGKILL comes from outside; most often the kernel's out-of-memory killer (see `dmesg`) or a scheduler"
    return "see what the rank printed before it ended"
