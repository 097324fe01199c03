"""Loggers: where a run's numbers go. Every name is imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.loggers.csv_logger import CSVLogger as CSVLogger
    from drivetrain.loggers.default import default_logger as default_logger
    from drivetrain.loggers.logger import Logger as Logger
    from drivetrain.loggers.tensorboard_logger import TensorBoardLogger as TensorBoardLogger

_HOME = {
    "CSVLogger": "csv_logger",
    "Logger": "logger",
    "TensorBoardLogger": "tensorboard_logger",
    "default_logger": "default",
}

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger", "default_logger"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
