"""Callbacks that come with drivetrain. Every name is imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.callbacks.model_summary import ModelSummary as ModelSummary
    from drivetrain.callbacks.progress_bar import ProgressBar as ProgressBar
    from drivetrain.callbacks.progress_default import default_progress_bar as default_progress_bar
    from drivetrain.callbacks.rich_progress_bar import RichProgressBar as RichProgressBar

_HOME = {
    "ModelSummary": "model_summary",
    "ProgressBar": "progress_bar",
    "RichProgressBar": "rich_progress_bar",
    "default_progress_bar": "progress_default",
}

__all__ = ["ModelSummary", "ProgressBar", "RichProgressBar", "default_progress_bar"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
