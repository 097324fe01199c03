"""Reads a finder's result from the checkpoint that a run resumes from."""

from __future__ import annotations

from typing import Any

from drivetrain.checkpoint._format import load
from drivetrain.errors import CheckpointError

_AUTOMATIC_PATHS = ("auto", "last", "best")


def load_saved_result(ckpt_path: str | None, key: str) -> dict[str, Any] | None:
    """Return a finder's state in a checkpoint.

    Args:
        ckpt_path: the run's ``ckpt_path``.
        key: the finder's ``state_key``.

    Returns:
        The state, or {} if the checkpoint does not contain the state or cannot be read. None if ``ckpt_path`` is None,
        "auto", "last" or "best", and thus not the path of a checkpoint.
    """
    if ckpt_path is None or ckpt_path in _AUTOMATIC_PATHS:
        return None
    try:
        saved = load(ckpt_path).state()["callbacks"][key]
    except (CheckpointError, KeyError, TypeError):  # The run raises an error when it loads the checkpoint.
        return {}
    return saved if isinstance(saved, dict) else {}
