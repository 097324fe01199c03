"""Look up loggers by name: those of drivetrain, and those that other packages register."""

from __future__ import annotations

from drivetrain._config.entry_points import EntryPointRegistry
from drivetrain.loggers.logger import Logger


def _csv(root: str) -> Logger:
    from drivetrain.loggers.csv_logger import CSVLogger

    return CSVLogger(root)


def _tensorboard(root: str) -> Logger:
    from drivetrain.loggers.tensorboard_logger import TensorBoardLogger

    return TensorBoardLogger(root)


def _wandb(root: str) -> Logger:
    from drivetrain.loggers.wandb_logger import WandbLogger

    return WandbLogger(save_dir=root)


def _mlflow(root: str) -> Logger:
    from drivetrain.loggers.mlflow_logger import MLFlowLogger

    return MLFlowLogger(save_dir=root)


_NAMES = EntryPointRegistry[Logger](
    "logger",
    "drivetrain.loggers",
    Logger,  # type: ignore[type-abstract]
    {"csv": _csv, "tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow},
    other_values=(),
    meaning="the name selects a logger",
    alternatives="a drivetrain.Logger, a list of both, True, False or None",
)


def logger_by_name(name: str, root: str) -> Logger:
    """Build the logger called ``name``.

    Args:
        name: "csv", "tensorboard", "wandb", "mlflow", or a name that a package has registered.
        root: the run's ``default_root_dir``, a local path or an fsspec URL, which is passed to the factory.

    Raises:
        ConfigurationError: no logger has that name, or the registered object does not make a logger.
    """
    return _NAMES.make(name, root)


def check_logger_name(name: str) -> None:
    """Check that a logger has this name, without building the logger.

    Raises:
        ConfigurationError: no logger has this name. The message suggests the nearest name.
    """
    _NAMES.check(name)
