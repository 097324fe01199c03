"""Finds the loaders of a stage, prepares them and computes their limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain._loops.evaluate import HOOK_STAGE_NAMES
from drivetrain._loops.hooks import is_overridden
from drivetrain.data import CombinedLoader, DataModule
from drivetrain.data._batch_source import BatchSource
from drivetrain.data._loaders import prepare_loader
from drivetrain.data.combined import is_loader
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


@dataclass(frozen=True, slots=True)
class DataSplit:
    """How the data is split over ranks.

    Attributes:
        rank: this rank's data rank.
        world_size: the data world size.
        seed: the seed of the sample order, the same on every rank.
        replace_sampler: ``Fit(use_distributed_sampler=...)``.
    """

    rank: int
    world_size: int
    seed: int
    replace_sampler: bool


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


def training_source(loaders: Any, data_split: DataSplit, sequential: bool) -> BatchSource:
    """Prepare the training loader. Several loaders are combined into one, and the longest ends the epoch."""
    if _is_several(loaders):
        loaders = CombinedLoader(loaders, mode="max_size_cycle")
    return _prepare("training loader", loaders, data_split, training=True, predicting=sequential)


def evaluation_sources(stage: str, loaders: Any, data_split: DataSplit, sequential: bool = False) -> list[BatchSource]:
    """Prepare one or several evaluation loaders of a stage, "validate", "test" or "predict"."""
    several, sources = several_loaders(loaders), []
    for index, loader in enumerate(several):
        name = f"{HOOK_STAGE_NAMES[stage]} loader{f' {index}' if len(several) > 1 else ''}"
        sources.append(_prepare(name, loader, data_split, training=False, predicting=sequential or stage == "predict"))
    return sources


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


def limit_of(setting: int | float | None, length: int | None, name: str) -> int | None:
    """Convert a limit to a number of micro-batches; None means no limit.

    Raises:
        ConfigurationError: the limit is a fraction of an unknown length, or rounds down to 0.
    """
    if setting is None or (isinstance(setting, float) and setting == 1.0):
        return None
    if isinstance(setting, int):
        return setting
    if setting == 0.0:
        return 0
    if length is None:
        raise ConfigurationError(
            f"{name}={setting} with a loader of unknown length.",
            "a fraction of an unknown length cannot be computed.",
            f"give the number of micro-batches as an int, such as {name}=100.",
        )
    limit = int(length * setting)
    if limit == 0:
        raise ConfigurationError(
            f"{name}={setting} of {length} micro-batches rounds down to 0.",
            "nothing would be trained or measured.",
            f"raise {name} to at least {1 / length:.3g}, or use 0 to leave the loader out.",
        )
    return limit


def expected_length(limit: int | None, length: int | None) -> int | None:
    """Return the number of micro-batches to expect; None if neither is known."""
    return limit if length is None else length if limit is None else min(limit, length)


def _prepare(name: str, loader: Any, data_split: DataSplit, *, training: bool, predicting: bool) -> BatchSource:
    try:
        return prepare_loader(
            loader,
            training=training,
            predicting=predicting,
            rank=data_split.rank,
            world_size=data_split.world_size,
            seed=data_split.seed,
            replace_sampler=data_split.replace_sampler,
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"The {name}: {error.what}", error.why, error.fix) from error.__cause__


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
