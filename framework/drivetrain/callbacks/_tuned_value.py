"""What a finder found for the run that is gone on with."""

from __future__ import annotations

from typing import Any

from drivetrain.checkpoint._format import load
from drivetrain.errors import CheckpointError

_CHOSEN = ("auto", "last", "best")


def saved_finding(ckpt_path: str | None, key: str) -> dict[str, Any] | None:
    """Return the state that a checkpoint holds of a finder, {} where it holds none; None where no path is named.

    Args:
        ckpt_path: what the run goes on from.
        key: the finder's ``state_key``.
    """
    if ckpt_path is None or ckpt_path in _CHOSEN:
        return None
    try:
        saved = load(ckpt_path).state()["callbacks"][key]["state"]
    except (CheckpointError, KeyError, TypeError):  # the run itself says what is wrong with it
        return {}
    return saved if isinstance(saved, dict) else {}
