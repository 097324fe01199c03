"""default_logger: chooses the logger of a run if the user passes none."""

from __future__ import annotations

import os

from drivetrain._runtime.lazy_names import is_installed
from drivetrain.loggers.csv_logger import CSVLogger
from drivetrain.loggers.logger import Logger
from drivetrain.loggers.tensorboard_logger import TensorBoardLogger


def default_logger(root_dir: str | os.PathLike[str] | None = None) -> Logger:
    """Return a `TensorBoardLogger` if TensorBoard is installed, else a `CSVLogger`.

    Args:
        root_dir: a local path or an fsspec URL; ``None`` for the working directory.
    """
    root = os.curdir if root_dir is None else root_dir
    return TensorBoardLogger(root) if is_installed("tensorboard") else CSVLogger(root)
