"""Loggers: where a run's numbers go. Every name is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from drivetrain.loggers.csv_logger import CSVLogger as CSVLogger
    from drivetrain.loggers.logger import Logger as Logger
    from drivetrain.loggers.tensorboard_logger import TensorBoardLogger as TensorBoardLogger

_HOME = {
    "CSVLogger": ".csv_logger",
    "Logger": ".logger",
    "TensorBoardLogger": ".tensorboard_logger",
}

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
