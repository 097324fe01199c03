"""StageData: the loaders of one stage, prepared for this rank, with their limits and lengths."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from drivetrain._distributed.control_plane import ControlPlane, check_ranks_agree
from drivetrain._engine.stage_loaders import (
    DataArguments,
    DataSplit,
    evaluation_sources,
    expected_length,
    find_loaders,
    is_combined,
    limit_of,
    loader_method,
    several_loaders,
    training_source,
)
from drivetrain._loops.evaluate import HOOK_STAGE_NAMES
from drivetrain._loops.hooks import is_overridden
from drivetrain._run_state import StageLoaders
from drivetrain._runtime.generators import preserved_generators
from drivetrain.data._batch_source import BatchSource
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext

logger = logging.getLogger("drivetrain")


class StageData(StageLoaders):
    """The prepared loaders of a stage, with their limits and lengths.

    Args:
        trainer: the `Fit`, whose limits apply.
        stage: "fit", "validate", "test" or "predict"; or "train" for fit without its validation.
        module: the module of the run, which may provide loaders.
        given: the loaders or the data module that were passed.
        data_split: how the data is split over ranks.
        control: exchanges lengths between ranks whose loaders differ.

    Raises:
        ConfigurationError: a loader is missing or empty, or the module lacks the step that the stage runs.
    """

    def __init__(
        self,
        trainer: RunContext,
        stage: str,
        module: TrainModule,
        given: DataArguments,
        data_split: DataSplit,
        control: ControlPlane,
    ) -> None:
        super().__init__()
        self._trainer = trainer
        self._module = module
        self._given = given
        self._data_split = data_split
        self._control = control
        self.train: BatchSource | None = None
        """The prepared training loader; None in other stages."""
        self.train_limit: int | None = None
        """The limit of micro-batches of a training epoch; None if the epoch ends with its data."""
        self.train_certain = True
        """Whether ``train_length`` is exact, rather than a loader's estimate."""
        self.batch_size: int | None = None
        """The number of samples in one rank's training micro-batch; None if the loader has no ``batch_size``."""
        self.sources: dict[str, list[BatchSource]] = {}
        """The prepared evaluation loaders by stage."""
        self.limits: dict[str, list[int | None]] = {}
        """The limit of micro-batches of each evaluation loader, by stage; None for all."""
        self._limit_settings: dict[str, tuple[int | float | None, str]] = {}
        if stage in ("fit", "train"):
            self._find_training()
            if stage == "fit" and is_overridden("validation_step", module, TrainModule):
                # Building validation loaders must not change the random numbers that training draws.
                with preserved_generators(torch.device("cpu")):
                    self._find_evaluation("validate", within_fit=True)
        else:
            self._find_evaluation(stage, within_fit=False)

    def __iter__(self) -> Iterator[BatchSource]:
        if self.train is not None:
            yield self.train
        for sources in self.sources.values():
            yield from sources

    def close(self) -> None:
        """Stop the loaders' worker processes."""
        for source in self:
            source.close()

    def facts(self) -> dict[str, Any]:
        """Return the facts that must be the same on every rank, for the handshake."""
        facts: dict[str, Any] = {}
        if self.train is not None:
            facts["training micro-batches"] = self.train.length if self.train.shards_known else None
            facts["training samples"] = self.train.samples
            facts["training subset"] = self.train.subset
        for stage, sources in self.sources.items():
            facts[f"{stage} micro-batches"] = [source.length if source.shards_known else None for source in sources]
            facts[f"{stage} samples"] = [source.samples for source in sources]
            facts[f"{stage} subset"] = [source.subset for source in sources]
        return facts

    def _find_training(self) -> None:
        trainer = self._trainer
        loaders = self._given.built_train_loaders
        if loaders is None:
            loaders = find_loaders("train", self._given.train, self._given.datamodule, self._module)
        if loaders is None:
            raise ConfigurationError(
                "fit was given no training loader.",
                "there is nothing to train on.",
                "pass one, Fit().fit(module, loader), or provide one by a DataModule or by module.train_dataloader().",
            )
        self.loaders = (loaders,)
        self.batch_size = getattr(loaders, "batch_size", None)
        self.train = training_source(loaders, self._data_split, sequential=bool(trainer.overfit_batches))
        self._measure_training()

    def resize_training(self) -> bool:
        """Use the present size of the training data from the next epoch on; return whether it changed. Collective.

        Raises:
            DistributedError: the sizes differ between ranks.
            ConfigurationError: the data has no batch now.
        """
        assert self.train is not None
        changed = self._changed_on_any_rank(self.train.refresh())
        if changed:
            self._measure_training()
        return changed

    def resize_evaluation(self, stage: str) -> list[int | None]:
        """Use the present sizes of the data of a stage, and return the limits. See `resize_training`. Collective."""
        changed = [source.refresh() for source in self.sources[stage]]
        if self._changed_on_any_rank(any(changed)):
            self._measure_evaluation(stage)
        return self.limits[stage]

    def _changed_on_any_rank(self, changed: bool) -> bool:
        if self._control.world_size == 1:
            return changed
        (ranks,) = self._control.count_flags("the size of the data", changed)
        if ranks:
            check_ranks_agree(self._control, self.facts())
        return ranks > 0

    def _measure_training(self) -> None:
        trainer = self._trainer
        assert self.train is not None
        setting, name = trainer.limit_train_batches, "limit_train_batches"
        if trainer.overfit_batches:
            setting, name = trainer.overfit_batches, "overfit_batches"
        length = self.train.length
        if not self.train.shards_known:
            # Each rank knows only the length of its own loader, and the longest loader ends the epoch.
            lengths = self._control.gather_objects(length)
            length = None if None in lengths else max(lengths)
        self.train_limit = limit = limit_of(setting, length, name)
        self.train_length = expected_length(limit, length)
        is_exact = self.train.shards_known and self.train.length_is_exact
        self.train_certain = is_exact or (limit is not None and limit == self.train_length)

    def _find_evaluation(self, stage: str, within_fit: bool) -> None:
        trainer, given, module = self._trainer, self._given, self._module
        loaders = find_loaders(stage, given.evaluate, given.datamodule, module)
        if loaders is None:
            if within_fit:
                if self._control.rank == 0 and trainer.limit_val_batches != 0:
                    logger.warning(
                        "%s has a validation_step, and fit was given no validation loader: fit does not validate. Pass "
                        "val_dataloaders, unless you call validate separately.",
                        type(module).__name__,
                    )
                return
            raise ConfigurationError(
                f"{stage} was given no loader.",
                "there is no data to run on.",
                f"pass dataloaders= to {stage}, a DataModule, or write {loader_method(stage)} in the module.",
            )
        step = f"{HOOK_STAGE_NAMES[stage]}_step"
        if stage != "predict" and not is_overridden(step, module, TrainModule):
            raise ConfigurationError(
                f"{type(module).__name__} has no {step}.",
                f"{stage} runs {step} on every batch.",
                f"write def {step}(self, batch, batch_idx).",
            )
        name = "limit_val_batches" if stage == "validate" else f"limit_{stage}_batches"
        setting = getattr(trainer, name)
        if within_fit and setting == 0:
            return
        if within_fit and trainer.overfit_batches:
            setting, name = trainer.overfit_batches, "overfit_batches"
            if not is_combined(self.loaders[0]):  # the training loader takes the place of each validation loader
                several = is_combined(loaders)
                loaders = [self.loaders[0]] * len(several_loaders(loaders)) if several else self.loaders[0]
        self.given_to_evaluate[stage] = loaders
        self.evaluated = tuple(several_loaders(loaders))
        self.sources[stage] = evaluation_sources(
            stage, loaders, self._data_split, sequential=within_fit and bool(trainer.overfit_batches)
        )
        self._limit_settings[stage] = setting, name
        self._measure_evaluation(stage)

    def _measure_evaluation(self, stage: str) -> None:
        setting, name = self._limit_settings[stage]
        self.limits[stage] = [limit_of(setting, source.length, name) for source in self.sources[stage]]
        self.lengths[stage] = [
            expected_length(limit, source.length)
            for limit, source in zip(self.limits[stage], self.sources[stage], strict=True)
        ]
