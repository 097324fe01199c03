"""The exceptions that drivetrain raises: each says what is wrong, why it matters and how to fix it."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from types import TracebackType


class DrivetrainError(Exception):
    """Base of every error drivetrain raises on purpose.

    Args:
        what: what is wrong, with the offending value.
        why: the reason it cannot be accepted.
        fix: what to do about it.
    """

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        # All three go to ``args``, so that the error can be pickled.
        super().__init__(what, why, fix)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  Why: {self.why}")
        if self.fix:
            lines.append(f"  Fix: {self.fix}")
        return "\n".join(lines)


class ConfigurationError(DrivetrainError):
    """A setting or a call is invalid, or contradicts another."""


class CheckpointError(DrivetrainError):
    """A checkpoint could not be written, could not be read or failed verification."""


class DistributedError(DrivetrainError):
    """A rank failed, did not respond or disagreed with the others."""


class NonFiniteError(DrivetrainError):
    """A loss, gradient or parameter became NaN or infinite."""


class LossSpikeError(DrivetrainError):
    """The loss spiked, and rolling back did not help."""


def shortened(error: ConfigurationError) -> ConfigurationError:
    """Return ``error`` with drivetrain's own frames removed from its traceback.

    What remains is the user's code: the line that made the call, and code that the engine called.
    With ``python -X dev`` nothing is removed.
    """
    return error if sys.flags.dev_mode else error.with_traceback(_without_ours(error.__traceback__))


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    kept, others = None, []
    while traceback is not None:
        if not traceback.tb_frame.f_globals.get("__name__", "").startswith(("drivetrain.", "drivetrain_strategies.")):
            others.append(traceback)
        traceback = traceback.tb_next
    for one in reversed(others):
        kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the known name closest to ``name``, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""


_SHOWN = 10  # names in a message


def listed(names: Sequence[str]) -> str:
    """Return the names in quotes, separated by commas; of many names only the first, and the number of the others."""
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
