"""Checks the values of a run's saved state that are used before their owners load them."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain._format import CheckpointReader

_INVALID_VALUE_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)

_MAX_COUNT = 2**63

_TYPES: dict[str, Any] = {
    **dict.fromkeys(("callbacks", "data"), dict),
    **dict.fromkeys(("callback_hooks", "components", "flattened_optimizer_state"), dict | None),
    **dict.fromkeys(("loop", "schedulers", "trainables"), dict | None),
    **dict.fromkeys(("data/seed", "data/world_size"), int),
}
"""The types of values in a run's state, by path. A missing value is None."""


def check_saved_state(checkpoint: CheckpointReader) -> None:
    """Check that the counters and the run's state in a checkpoint are well-formed.

    Raises:
        CheckpointError: a value is missing, or has another type. The error names the file and the key.
    """
    check_progress(checkpoint)
    part = checkpoint.manifest.state
    file = "state.json" if part is None or part.document is None else part.document
    state = checkpoint.state()
    for path, kind in _TYPES.items():
        value = state
        for key in path.split("/"):
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, kind) or (isinstance(value, int) and abs(value) >= _MAX_COUNT):
            raise _malformed(checkpoint, file, path, value)
    if not 1 <= state["data"]["world_size"] <= checkpoint.manifest.world_size:
        raise _malformed(checkpoint, file, "data/world_size", state["data"]["world_size"])


def check_progress(checkpoint: CheckpointReader) -> None:
    """Check that the saved counters are non-negative integers.

    Raises:
        CheckpointError: a counter is invalid. The error names the file and the key.
    """
    progress = checkpoint.progress
    for name in dict.fromkeys(("epoch", "global_step", *progress)):
        value = progress.get(name)
        if type(value) is not int or not 0 <= value < _MAX_COUNT:
            raise _malformed(checkpoint, "manifest.json", f"progress/{name}", value)


@contextmanager
def reporting_malformed(checkpoint: CheckpointReader, file: str, key: str) -> Iterator[None]:
    """Replace a built-in error that restoring a value raises by an error that names the file and the key.

    Raises:
        CheckpointError: the block raised a KeyError, TypeError, ValueError or similar error.
    """
    try:
        yield
    except _INVALID_VALUE_ERRORS as error:
        raise CheckpointError(
            f"The checkpoint {checkpoint.path!r} is malformed: {key!r} in {file} cannot be restored: "
            f"{type(error).__name__}: {error}.",
            "the value does not have the form that the object's state_dict returns.",
            "use another checkpoint, or load the weights alone with load_from_checkpoint.",
        ) from error


def _malformed(checkpoint: CheckpointReader, file: str, key: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {checkpoint.path!r} is malformed: {key!r} in {file} is {reprlib.repr(value)}.",
        "a run cannot resume from it.",
        "use another checkpoint, or load the weights alone with load_from_checkpoint.",
    )
