"""The loaders of one stage, prepared for this rank, and how much of each is read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._engine.stage_loaders import (
    Dealing,
    Given,
    evaluation_sources,
    find_loaders,
    is_combined,
    limit_of,
    loader_method,
    several_loaders,
    shorter,
    training_source,
)
from drivetrain._loops.evaluate import NAMES
from drivetrain._loops.hooks import is_overridden
from drivetrain._runtime.generators import preserved_generators
from drivetrain.data._batch_source import BatchSource
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext

logger = logging.getLogger("drivetrain")


class StageData:
    """What a stage reads.

    Args:
        trainer: whose limits hold.
        stage: "fit", "validate", "test" or "predict"; or "train" for the part of fit that trains.
        module: whose own loaders serve where none are given.
        given: the loaders or the data module.
        dealing: how they are dealt to ranks.
        control: the way to the other ranks, where only they know how much they have.

    Raises:
        ConfigurationError: there is no loader where one is needed, none for the step that is there, or no batch in it.
    """

    def __init__(
        self,
        trainer: RunContext,
        stage: str,
        module: TrainModule,
        given: Given,
        dealing: Dealing,
        control: ControlPlane,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._given = given
        self._dealing = dealing
        self._control = control
        self.train: BatchSource | None = None
        self.loaders: tuple[Any, ...] = ()
        """The training loader(s) as the user gave them."""
        self.train_limit: int | None = None
        """Micro-batches after which a training epoch is cut off; None where its data end it."""
        self.train_length: int | None = None
        """Micro-batches that a training epoch should have, the same on every rank; None where nothing says."""
        self.train_certain = True
        """Whether it has exactly as many, whatever a loader says."""
        self.batch_size: int | None = None
        """Samples of one rank's training micro-batch; None where the loader does not say."""
        self.evaluated: tuple[Any, ...] = ()
        """The evaluation loaders, one by one."""
        self.given_to_evaluate: dict[str, Any] = {}
        """By stage what the user gave: a loader, or a collection of them."""
        self.sources: dict[str, list[BatchSource]] = {}
        """Evaluation loaders by stage."""
        self.limits: dict[str, list[int | None]] = {}
        """Micro-batches to read of each of them at most; None for all there are."""
        self.lengths: dict[str, list[int | None]] = {}
        """Micro-batches that each of them should give; None where nothing says."""
        if stage in ("fit", "train"):
            self._find_training()
            if stage == "fit" and is_overridden("validation_step", module, TrainModule):
                with preserved_generators(
                    torch.device("cpu")
                ):  # of training, which began before validation was asked for
                    self._find_evaluation("validate", within_fit=True)
        else:
            self._find_evaluation(stage, within_fit=False)

    def __iter__(self) -> Iterator[BatchSource]:
        if self.train is not None:
            yield self.train
        for sources in self.sources.values():
            yield from sources

    def close(self) -> None:
        """Let go of all workers."""
        for source in self:
            source.close()

    def facts(self) -> dict[str, Any]:
        """What must be alike on every rank, for the handshake."""
        facts: dict[str, Any] = {}
        if self.train is not None:
            facts["training micro-batches"] = self.train.length if self.train.static else None
            facts["training samples"] = self.train.samples
            facts["training subset"] = self.train.subset
        for stage, sources in self.sources.items():
            facts[f"{stage} micro-batches"] = [source.length if source.static else None for source in sources]
            facts[f"{stage} samples"] = [source.samples for source in sources]
            facts[f"{stage} subset"] = [source.subset for source in sources]
        return facts

    def _find_training(self) -> None:
        trainer = self._trainer
        loaders = self._given.asked_for
        if loaders is None:
            loaders = find_loaders("train", self._given.train, self._given.datamodule, self._module)
        if loaders is None:
            raise ConfigurationError(
                "fit was given no training loader.",
                "there is nothing to train on.",
                "pass it to fit, as Fit().fit(module, loader), in a DataModule, or as module.train_dataloader().",
            )
        self.loaders = (loaders,)
        self.batch_size = getattr(loaders, "batch_size", None)
        self.train = training_source(loaders, self._dealing, sequential=bool(trainer.overfit_batches))
        setting, name = trainer.limit_train_batches, "limit_train_batches"
        if trainer.overfit_batches:
            setting, name = trainer.overfit_batches, "overfit_batches"
        length = self.train.length
        if not self.train.static:  # each rank knows its own; the longest ends the epoch
            lengths = self._control.gather_objects(length)
            length = None if None in lengths else max(lengths)
        self.train_limit = limit = limit_of(setting, length, name)
        self.train_length = shorter(limit, length)
        sure = self.train.static and self.train.certain
        self.train_certain = sure or (limit is not None and limit == self.train_length)

    def _find_evaluation(self, stage: str, within_fit: bool) -> None:
        trainer, given, module = self._trainer, self._given, self._module
        loaders = find_loaders(stage, given.evaluate, given.datamodule, module)
        if loaders is None:
            if within_fit:
                if self._control.rank == 0 and trainer.limit_val_batches != 0:
                    logger.warning(
                        "%s has a validation_step, and fit was given no validation loader: nothing is validated while "
                        "it trains. Pass val_dataloaders; where validate alone is called, that is as it should be.",
                        type(module).__name__,
                    )
                return
            raise ConfigurationError(
                f"{stage} was given no loader.",
                "there is nothing to run on.",
                f"pass dataloaders= to {stage}, a DataModule, or write {loader_method(stage)} in the module.",
            )
        step = f"{NAMES[stage]}_step"
        if stage != "predict" and not is_overridden(step, module, TrainModule):
            raise ConfigurationError(
                f"{type(module).__name__} has no {step}.",
                f"{stage} runs it on every batch.",
                f"write def {step}(self, batch, batch_idx).",
            )
        name = "limit_val_batches" if stage == "validate" else f"limit_{stage}_batches"
        setting = getattr(trainer, name)
        if within_fit and setting == 0:
            return
        if within_fit and trainer.overfit_batches:
            setting, name = trainer.overfit_batches, "overfit_batches"
            if not is_combined(self.loaders[0]):  # on what is trained on, in the same order, as often as it was given
                several = is_combined(loaders)
                loaders = [self.loaders[0]] * len(several_loaders(loaders)) if several else self.loaders[0]
        self.given_to_evaluate[stage] = loaders
        self.evaluated = tuple(several_loaders(loaders))
        self.sources[stage] = evaluation_sources(
            stage, loaders, self._dealing, sequential=within_fit and bool(trainer.overfit_batches)
        )
        self.limits[stage] = [limit_of(setting, source.length, name) for source in self.sources[stage]]
        self.lengths[stage] = [
            shorter(limit, source.length) for limit, source in zip(self.limits[stage], self.sources[stage], strict=True)
        ]
