"""The exceptions that drivetrain raises: each says what is wrong, why it matters and how to fix it."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from types import TracebackType


class DrivetrainError(Exception):
    """Base class of every error that drivetrain raises on purpose.

    Args:
        what: what is wrong, with the offending value.
        why: the reason why this is an error.
        fix: how to fix the error.
    """

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        # All three arguments become ``self.args``, so that the error can be pickled.
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
    """A setting or a call is invalid, or contradicts another setting."""


class CheckpointError(DrivetrainError):
    """A checkpoint could not be written, could not be read or failed verification."""


class DistributedError(DrivetrainError):
    """A rank failed, did not respond, or differed from the other ranks."""


class NonFiniteError(DrivetrainError):
    """A loss, gradient or parameter became NaN or infinite."""


class LossSpikeError(DrivetrainError):
    """The loss spiked, and rolling back did not help."""


def shortened(error: ConfigurationError) -> ConfigurationError:
    """Return ``error`` with drivetrain's own frames removed from its traceback.

    The frames of the user's code remain: the call, and code that the engine called. With ``python -X dev``, all frames
    remain.
    """
    return error if sys.flags.dev_mode else error.with_traceback(_without_own_frames(error.__traceback__))


def _without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    result, others = None, []
    while traceback is not None:
        if not traceback.tb_frame.f_globals.get("__name__", "").startswith(("drivetrain.", "drivetrain_strategies.")):
            others.append(traceback)
        traceback = traceback.tb_next
    for entry in reversed(others):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the known name closest to ``name``, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""


_MAX_LISTED = 10  # the number of names that a message lists


def listed(names: Sequence[str]) -> str:
    """Return the quoted names, separated by commas. Of more than ten, only ten and the number of the rest are given."""
    return ", ".join(map(repr, names[:_MAX_LISTED])) + (
        f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    )
