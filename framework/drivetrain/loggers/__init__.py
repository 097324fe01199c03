"""Loggers for metrics, hyper-parameters and media. Every name is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from drivetrain.loggers.csv_logger import CSVLogger as CSVLogger
    from drivetrain.loggers.logger import Logger as Logger
    from drivetrain.loggers.media import Histogram as Histogram
    from drivetrain.loggers.media import Table as Table
    from drivetrain.loggers.mlflow_logger import MLFlowLogger as MLFlowLogger
    from drivetrain.loggers.tensorboard_logger import TensorBoardLogger as TensorBoardLogger
    from drivetrain.loggers.wandb_logger import WandbLogger as WandbLogger

_HOME = {
    "CSVLogger": ".csv_logger",
    "Histogram": ".media",
    "Logger": ".logger",
    "MLFlowLogger": ".mlflow_logger",
    "Table": ".media",
    "TensorBoardLogger": ".tensorboard_logger",
    "WandbLogger": ".wandb_logger",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
