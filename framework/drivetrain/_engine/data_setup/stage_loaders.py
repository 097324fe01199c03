"""Finds the loaders of a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain._data.combined import is_loader
from drivetrain._loops.hooks import is_overridden
from drivetrain.data import CombinedLoader, DataModule
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule

_CHECKED_ENTRIES = 8
"""The number of entries of a list in which to look for loaders. A list may also be a long list of batches."""

_METHOD_PREFIXES = {"train": "train", "validate": "val", "test": "test", "predict": "predict"}


@dataclass(frozen=True, slots=True)
class DataArguments:
    """The data arguments of a call of `Fit.fit` or another entry point."""

    train: Any = None
    evaluate: Any = None
    datamodule: DataModule | None = None
    built_train_loaders: Any = None
    """The training loader(s), if they were built in `setup` to estimate the run's length."""


def loader_method(kind: str) -> str:
    """Return the name of the method that provides the loader(s) for ``kind``."""
    return f"{_METHOD_PREFIXES[kind]}_dataloader"


def find_loaders(kind: str, given: Any, datamodule: DataModule | None, module: TrainModule) -> Any:
    """Return the loader(s) for ``kind`` ("train", "validate", "test", "predict"), or None if there are none.

    Loaders that were passed take precedence over the loaders of the data module, and these over the module's.

    Raises:
        ConfigurationError: loaders and a data module were both passed.
    """
    name = loader_method(kind)
    if given is not None and datamodule is not None:
        raise ConfigurationError(
            f"Both {kind} loaders and a datamodule were given.",
            "the loaders or the datamodule would be ignored.",
            "pass either the loaders or datamodule=.",
        )
    if given is not None:
        return given
    if datamodule is not None and is_overridden(name, datamodule, DataModule):
        return getattr(datamodule, name)()
    if is_overridden(name, module, TrainModule):
        return getattr(module, name)()
    return None


def several_loaders(loaders: Any) -> list[Any]:
    """Return one or several evaluation loaders as a list."""
    if isinstance(loaders, CombinedLoader) and loaders.mode == "sequential":
        return loaders.flattened
    if _is_several(loaders):
        return list(loaders.values()) if isinstance(loaders, Mapping) else list(loaders)
    return [loaders]


def is_combined(loaders: Any) -> bool:
    """Return whether ``loaders`` are several loaders, which training combines."""
    return isinstance(loaders, CombinedLoader) or _is_several(loaders)


def _is_several(loaders: Any) -> bool:
    """Return whether ``loaders`` is a collection of loaders. A list may also be one loader, a list of batches."""
    if isinstance(loaders, Mapping):
        return True
    if not isinstance(loaders, list | tuple):
        return False
    entries = loaders[:_CHECKED_ENTRIES]  # a list of batches may be long, and its entries are alike
    if any(isinstance(entry, Mapping) and not _holds_loaders(entry) for entry in entries):
        return False
    return any(is_loader(entry) or isinstance(entry, Mapping) or _is_several(entry) for entry in entries)


def _holds_loaders(loaders: Mapping[Any, Any]) -> bool:
    return any(is_loader(loader) for loader in loaders.values())
