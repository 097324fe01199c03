"""Checkpoints: one layout, written under any strategy and read under any other. Every name is imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.checkpoint.consolidating import consolidate as consolidate
    from drivetrain.checkpoint.converting import convert as convert
    from drivetrain.checkpoint.showing import diff as diff
    from drivetrain.checkpoint.showing import show as show
    from drivetrain.checkpoint_format import Checkpoint as Checkpoint
    from drivetrain.checkpoint_format import load as load
    from drivetrain.checkpoint_format import verify as verify

_FORMAT = "drivetrain.checkpoint_format"
_HOME = {
    "Checkpoint": _FORMAT,
    "consolidate": f"{__name__}.consolidating",
    "convert": f"{__name__}.converting",
    "diff": f"{__name__}.showing",
    "load": _FORMAT,
    "show": f"{__name__}.showing",
    "verify": _FORMAT,
}

__all__ = ["Checkpoint", "consolidate", "convert", "diff", "load", "show", "verify"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
