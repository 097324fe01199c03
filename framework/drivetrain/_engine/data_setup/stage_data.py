"""StageData: the loaders of one stage, prepared for this rank, with their limits and lengths."""

from __future__ import annotations

import logging
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from drivetrain._data.batch_source import BatchSource
from drivetrain._data.limited_source import LimitedSource
from drivetrain._data.loaders import prepare_loader
from drivetrain._distributed.control_plane import check_ranks_agree
from drivetrain._engine.data_setup.stage_loaders import (
    DataArguments,
    find_loaders,
    is_combined,
    loader_method,
    several_loaders,
)
from drivetrain._loops.evaluate import HOOK_STAGE_NAMES
from drivetrain._loops.hooks import is_overridden
from drivetrain._run_state import StageLoaders
from drivetrain._runtime.generators import preserved_generators
from drivetrain.data import CombinedLoader
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule
from drivetrain.strategies.strategy import Strategy

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
        strategy: the strategy, by whose ranks the data is split.
        seed: the seed of the sample order, the same on every rank.

    Raises:
        ConfigurationError: a loader is missing or empty, or the module lacks the step that the stage runs.
    """

    def __init__(
        self,
        trainer: RunContext,
        stage: str,
        module: TrainModule,
        given: DataArguments,
        strategy: Strategy,
        seed: int,
    ) -> None:
        super().__init__()
        self._trainer = trainer
        self._module = module
        self._given = given
        self._strategy = strategy
        self._control = strategy.control
        self._seed = seed
        self.training: LimitedSource | None = None
        """The prepared training loader; None in other stages."""
        self.batch_size: int | None = None
        """The number of samples in one rank's training micro-batch; None if the loader has no ``batch_size``."""
        self.evaluation: dict[str, list[LimitedSource]] = {}
        """The prepared evaluation loaders by stage."""
        if stage in ("fit", "train"):
            self._find_training()
            if stage == "fit" and is_overridden("validation_step", module, TrainModule):
                # Building validation loaders must not change the random numbers that training draws.
                with preserved_generators(torch.device("cpu")):
                    self._find_evaluation("validate", within_fit=True)
        else:
            self._find_evaluation(stage, within_fit=False)

    @property
    def train(self) -> BatchSource | None:
        """The source of training batches; None in other stages."""
        return None if self.training is None else self.training.source

    def close(self) -> None:
        """Stop the loaders' worker processes."""
        for loader in chain([] if self.training is None else [self.training], *self.evaluation.values()):
            loader.source.close()

    def facts(self) -> dict[str, Any]:
        """Return the facts that must be the same on every rank, for the handshake."""
        facts: dict[str, Any] = {}
        if self.train is not None:
            facts["training micro-batches"] = self.train.length if self.train.shards_known else None
            facts["training samples"] = self.train.samples
            facts["training subset"] = self.train.subset
        for stage, loaders in self.evaluation.items():
            sources = [loader.source for loader in loaders]
            facts[f"{stage} micro-batches"] = [source.length if source.shards_known else None for source in sources]
            facts[f"{stage} samples"] = [source.samples for source in sources]
            facts[f"{stage} subset"] = [source.subset for source in sources]
        return facts

    def _find_training(self) -> None:
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
        if is_combined(loaders) and not isinstance(loaders, CombinedLoader):
            loaders = CombinedLoader(loaders, mode="max_size_cycle")
        self.training = self._prepare("training loader", loaders, "limit_train_batches", stage="train", within_fit=True)
        self._measure_training(self.training)

    def _prepare(self, title: str, loader: Any, limit: str, *, stage: str, within_fit: bool) -> LimitedSource:
        strategy, trainer = self._strategy, self._trainer
        overfits = within_fit and bool(trainer.overfit_batches)
        try:
            source = prepare_loader(
                loader,
                training=stage == "train",
                predicting=stage == "predict" or overfits,
                rank=strategy.data_rank,
                world_size=strategy.data_world_size,
                seed=self._seed,
                replace_sampler=trainer.use_distributed_sampler,
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"The {title}: {error.what}", error.why, error.fix) from error.__cause__
        name = "overfit_batches" if overfits else limit
        return LimitedSource(source, getattr(trainer, name), name)

    def resize_training(self) -> bool:
        """Use the present size of the training data from the next epoch on; return whether it changed. Collective.

        Raises:
            DistributedError: the sizes differ between ranks.
            ConfigurationError: the data has no batch now.
        """
        assert self.training is not None
        changed = self._changed_on_any_rank(self.training.source.refresh())
        if changed:
            self._measure_training(self.training)
        return changed

    def resize_evaluation(self, stage: str) -> list[int | None]:
        """Use the present sizes of the data of a stage, and return the limits. See `resize_training`. Collective."""
        loaders = self.evaluation[stage]
        changed = [loader.source.refresh() for loader in loaders]
        if self._changed_on_any_rank(any(changed)):
            self._measure_evaluation(stage)
        return [loader.limit for loader in loaders]

    def _changed_on_any_rank(self, changed: bool) -> bool:
        if self._control.world_size == 1:
            return changed
        (ranks,) = self._control.count_flags("the size of the data", changed)
        if ranks:
            check_ranks_agree(self._control, self.facts())
        return ranks > 0

    def _measure_training(self, training: LimitedSource) -> None:
        length = training.source.length
        if not training.source.shards_known:
            # Each rank knows only the length of its own loader, and the longest loader ends the epoch.
            lengths = self._control.gather_objects(length)
            length = None if None in lengths else max(lengths)
        training.measure(length)
        self.train_length = training.length

    def _measure_evaluation(self, stage: str) -> None:
        for loader in self.evaluation[stage]:
            loader.measure(loader.source.length)
        self.lengths[stage] = [loader.length for loader in self.evaluation[stage]]

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
        if within_fit and getattr(trainer, name) == 0:
            return
        if within_fit and trainer.overfit_batches and not is_combined(self.loaders[0]):
            several = is_combined(loaders)  # the training loader takes the place of each validation loader
            loaders = [self.loaders[0]] * len(several_loaders(loaders)) if several else self.loaders[0]
        self.given_to_evaluate[stage] = loaders
        self.evaluated = tuple(several_loaders(loaders))
        prepared = self.evaluation[stage] = []
        for index, loader in enumerate(self.evaluated):
            title = f"{HOOK_STAGE_NAMES[stage]} loader{f' {index}' if len(self.evaluated) > 1 else ''}"
            prepared.append(self._prepare(title, loader, name, stage=stage, within_fit=within_fit))
        self._measure_evaluation(stage)
