"""Look up loggers by name: those of drivetrain, and those that other packages register."""

from __future__ import annotations

from drivetrain import loggers
from drivetrain._config.entry_points import EntryPointRegistry
from drivetrain.loggers.logger import Logger

_NAMES = EntryPointRegistry[Logger](
    "logger",
    "drivetrain.loggers",
    Logger,  # type: ignore[type-abstract]
    {
        "csv": lambda root: loggers.CSVLogger(root),  # a lambda, because the class is imported on first use
        "tensorboard": lambda root: loggers.TensorBoardLogger(root),
        "wandb": lambda root: loggers.WandbLogger(save_dir=root),
        "mlflow": lambda root: loggers.MLFlowLogger(save_dir=root),
    },
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
