"""Checkpoints in one format, written under any strategy and readable under any other.

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from drivetrain._format import CheckpointReader as CheckpointReader
    from drivetrain._format import load as load
    from drivetrain._format import verify as verify
    from drivetrain.checkpoint.averaged_weights import evaluated_weights as evaluated_weights
    from drivetrain.checkpoint.consolidation import consolidate as consolidate
    from drivetrain.checkpoint.conversion import convert as convert
    from drivetrain.checkpoint.inspection import show as show
    from drivetrain.checkpoint.save_request import SaveRequest as SaveRequest

_FORMAT = "drivetrain._format"
_HOME = {
    "CheckpointReader": _FORMAT,
    "SaveRequest": ".save_request",
    "consolidate": ".consolidation",
    "convert": ".conversion",
    "evaluated_weights": ".averaged_weights",
    "load": _FORMAT,
    "show": ".inspection",
    "verify": _FORMAT,
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
