"""Checks what a stage requires of the module and the data, before processes are started or weights are moved."""

from __future__ import annotations

import logging
from difflib import get_close_matches
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from drivetrain._engine.data_setup.stage_loaders import DataArguments
from drivetrain._loops.hooks import is_overridden
from drivetrain.data import DataModule
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule

logger = logging.getLogger("drivetrain")

_REQUIRED_METHODS = {
    "training_step": "def training_step(self, batch, batch_idx), returning the loss",
    "configure_optimizers": "def configure_optimizers(self), returning an optimizer; None trains nothing",
}


def check_requirements(stage: str, module: TrainModule, given: DataArguments) -> None:
    """Check that the module has the methods that training calls, and no misnamed hooks, and that loaders are loaders.

    Raises:
        ConfigurationError: a method is missing or misnamed, or a loader is not a loader. The error says how to fix it.
    """
    if stage == "fit":
        for name, signature in _REQUIRED_METHODS.items():
            if not is_overridden(name, module, TrainModule):
                names = [key for kind in type(module).__mro__ if issubclass(kind, TrainModule) for key in vars(kind)]
                close = get_close_matches(name, set(names) - set(dir(TrainModule)), n=1)
                hint = f" It has {close[0]!r}, which the engine never calls." if close else ""
                raise ConfigurationError(
                    f"{type(module).__name__} has no {name}.{hint}",
                    f"fit cannot train without {name}.",
                    f"write {signature}.",
                )
    from drivetrain._engine.assembly.misnamed_hooks import check_hooks

    check_hooks(module, given, stage)
    if isinstance(given.datamodule, DataModule):
        check_hooks(given.datamodule, stage=stage)
    for loaders in (given.train, given.evaluate):
        for loader in _each(loaders):
            if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
                raise ConfigurationError(
                    f"{stage} was given a {type(loader).__name__}, which is a data set.",
                    "a data set yields single samples, and steps take batches.",
                    "wrap it in a loader: torch.utils.data.DataLoader(dataset, batch_size=32, shuffle=True).",
                )


def warn_of_unused_loader(stage: str, module: TrainModule, given: DataArguments) -> None:
    """Warn that validation loaders were given to a module without a ``validation_step``."""
    if stage == "fit" and given.evaluate is not None and not is_overridden("validation_step", module, TrainModule):
        logger.warning(
            "fit was given validation loaders, and %s has no validation_step: nothing is validated.",
            type(module).__name__,
        )


def _each(loaders: Any) -> list[Any]:
    if isinstance(loaders, dict):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, list | tuple) else [loaders]
