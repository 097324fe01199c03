"""RunData: the loaders of a run, prepared for this rank, with their limits and lengths, and how they are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from drivetrain._data.batch_source import BatchSource, LimitedLoader
from drivetrain._data.combined import is_collection
from drivetrain._data.loaders import prepare_loader
from drivetrain._data.rng_replay import RngReplay
from drivetrain._data.sharding import EPOCH_START, EpochOffset
from drivetrain._distributed.control_plane import check_ranks_agree
from drivetrain._engine.run_request import RunRequest, loader_method
from drivetrain._loops.data_checks import Lengths
from drivetrain._loops.evaluate import HOOK_STAGE_NAMES
from drivetrain._loops.hooks import is_overridden
from drivetrain._run_state import Progress, StageLoaders
from drivetrain._runtime.generators import preserved_generators
from drivetrain.data import CombinedLoader
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule
from drivetrain.strategies.strategy import Strategy

logger = logging.getLogger("drivetrain")


class RunData(StageLoaders):
    """The data of a run. `load` finds the loaders and prepares them for this rank, and `StageLoaders` shows them.

    Args:
        request: the call of `Fit`, with its loaders and their limits.
        strategy: the strategy, by whose ranks the data is split.
    """

    def __init__(self, request: RunRequest, strategy: Strategy) -> None:
        super().__init__()
        self._request = request
        self._strategy = strategy
        self._training: LimitedLoader | None = None
        self._built_early: Any = None  # the training loader(s), if `length_before_loading` has built them
        self.evaluation: dict[str, list[LimitedLoader]] = {}
        """The prepared evaluation loaders by stage."""
        self.batch_size: int | None = None
        """The number of samples in one rank's training micro-batch; None if the loader has no ``batch_size``."""
        self.seed = 0
        """The seed of the order of samples, the same on every rank. It is set before `load`."""
        self.epoch_position = EpochPosition()
        """How the epoch is split over ranks."""
        self.rng_replay = RngReplay(strategy.device)
        """The random generators' states by micro-batch, for loaders that read ahead."""
        self.lengths = Lengths(strategy.control)
        """Warns about loaders whose length proved wrong."""
        self.reload: Callable[[int], None] | None = None
        """Rebuilds the loaders of an epoch; None unless ``reload_dataloaders_every_n_epochs`` is set."""
        self.counted_from: tuple[int | None, int, int] = (None, 0, 0)
        """By which the run's steps are estimated: micro-batches of an epoch, the first such epoch, the steps before."""
        self.estimate_was_read = False
        """Whether user code has read `estimated_stepping_batches`, on which a schedule may depend."""

    @property
    def trains(self) -> bool:
        """Whether the training loader is prepared."""
        return self._training is not None

    @property
    def validates(self) -> bool:
        """Whether there are validation loaders."""
        return bool(self.evaluation.get("validate"))

    @property
    def training(self) -> LimitedLoader:
        """The training loader, once it is prepared."""
        assert self._training is not None
        return self._training

    @property
    def train(self) -> BatchSource:
        """The source of training batches, once it is prepared."""
        return self.training.source

    def facts(self) -> dict[str, Any]:
        """Return the facts that must be the same on every rank, which `check_ranks_agree` compares."""
        facts: dict[str, Any] = {}
        if self.trains:
            facts["training micro-batches"] = self.train.length if self.train.shares_known else None
            facts["training samples"] = self.train.samples
            facts["training subset"] = self.train.subset
        for stage, loaders in self.evaluation.items():
            sources = [loader.source for loader in loaders]
            facts[f"{stage} micro-batches"] = [source.length if source.shares_known else None for source in sources]
            facts[f"{stage} samples"] = [source.samples for source in sources]
            facts[f"{stage} subset"] = [source.subset for source in sources]
        return facts

    def close(self) -> None:
        """Stop the loaders' worker processes."""
        for loader in chain([] if self._training is None else [self._training], *self.evaluation.values()):
            loader.source.close()

    # Loading

    def load(self) -> None:
        """Find the loaders of the stage, and prepare them. Collective.

        Raises:
            ConfigurationError: a loader is missing or empty, or the module lacks the step that the stage runs.
        """
        request = self._request
        self.epoch_position.world_size = self._strategy.data_world_size
        self.evaluated, self.given_to_evaluate, self.evaluation_lengths, self.evaluation = (), {}, {}, {}
        if request.stage != "fit":
            self._load_evaluation(request.stage)
            return
        loaders = self._find_training() if self._built_early is None else self._built_early
        self.loaders = (loaders,)
        self.batch_size = getattr(loaders, "batch_size", None)
        self._training = self._prepare_training(loaders)
        self.train_length = self._training.length
        if self.counted_from[0] is None:
            self.counted_from = self.train_length, 0, 0
        if is_overridden("validation_step", request.module, TrainModule):
            # Building validation loaders must not change the random numbers that training draws.
            with preserved_generators(torch.device("cpu")):
                self._load_evaluation("validate")
        elif request.evaluate is not None and self._strategy.control.rank == 0:
            name = type(request.module).__name__
            logger.warning(
                "fit was given validation loaders, and %s has no validation_step: nothing is validated.", name
            )

    def length_before_loading(self) -> int | None:
        """Return the number of micro-batches of a training epoch in ``setup``, before `load`. Collective.

        The training loader is built for this, and used by `load` unless it is to be rebuilt during the run.
        """
        loaders = self._find_training()
        if not self._request.trainer.reload_dataloaders_every_n_epochs:
            self._built_early = loaders
        training = self._prepare_training(loaders)
        training.source.close()
        return training.length

    def _find_training(self) -> Any:
        loaders = self._request.find_loaders("train")
        if loaders is None:
            raise ConfigurationError(
                "fit was given no training loader.",
                "there is nothing to train on.",
                "pass one, Fit().fit(module, loader), or provide one by a DataModule or by module.train_dataloader().",
            )
        return loaders

    def _prepare_training(self, loaders: Any) -> LimitedLoader:
        training = self._prepare("training loader", loaders, "limit_train_batches", "train")
        self._measure_training(training)
        return training

    def _load_evaluation(self, stage: str) -> None:
        request, trainer, module = self._request, self._request.trainer, self._request.module
        within_fit = request.stage == "fit"
        limit = "limit_val_batches" if stage == "validate" else f"limit_{stage}_batches"
        loaders = request.find_loaders(stage)
        if loaders is None:
            if within_fit:
                if self._strategy.control.rank == 0 and trainer.limit_val_batches != 0:
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
        if within_fit and getattr(trainer, limit) == 0:
            return
        if within_fit and trainer.overfit_batches and not _are_several(self.loaders[0]):
            several = _are_several(loaders)  # the training loader takes the place of each validation loader
            loaders = [self.loaders[0]] * len(_as_list(loaders)) if several else self.loaders[0]
        self.given_to_evaluate[stage] = loaders
        self.evaluated = tuple(_as_list(loaders))
        prepared = self.evaluation[stage] = []
        for index, loader in enumerate(self.evaluated):
            title = f"{HOOK_STAGE_NAMES[stage]} loader{f' {index}' if len(self.evaluated) > 1 else ''}"
            prepared.append(self._prepare(title, loader, limit, stage))
        self._measure_evaluation(stage)

    def _prepare(self, title: str, loader: Any, limit: str, stage: str) -> LimitedLoader:
        strategy, trainer = self._strategy, self._request.trainer
        overfits = self._request.stage == "fit" and bool(trainer.overfit_batches)
        try:
            source = prepare_loader(
                loader,
                training=stage == "train",
                predicting=stage == "predict" or overfits,
                rank=strategy.data_rank,
                world_size=strategy.data_world_size,
                seed=self.seed,
                replace_sampler=trainer.use_distributed_sampler,
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"The {title}: {error.what}", error.why, error.fix) from error.__cause__
        name = "overfit_batches" if overfits else limit
        return LimitedLoader(source, getattr(trainer, name), name)

    # Sizes

    def resize_training(self, progress: Progress, epoch_begins: bool) -> bool:
        """Read the size of the training data again; return whether it has changed. Collective.

        Raises:
            DistributedError: the sizes differ between ranks.
            ConfigurationError: the data has no batch now, or an epoch that is resumed within began with another number
                of samples.
        """
        changed = self._changed_on_any_rank(self.train.refresh())
        if changed:
            self._measure_training(self.training)
            self.train_length = self.training.length
            made = (progress.epoch, progress.global_step) if epoch_begins else (0, 0)
            self.counted_from = self.train_length, *made
        if not epoch_begins:
            self.epoch_position.check_samples(self.train)
        return changed

    def resize_evaluation(self, stage: str) -> list[int | None]:
        """Read the sizes of the data of a stage again, and return the limits. See `resize_training`. Collective."""
        loaders = self.evaluation[stage]
        changed = [loader.source.refresh() for loader in loaders]
        if self._changed_on_any_rank(any(changed)):
            self._measure_evaluation(stage)
        return [loader.limit for loader in loaders]

    def _changed_on_any_rank(self, changed: bool) -> bool:
        control = self._strategy.control
        if control.world_size == 1:
            return changed
        (ranks,) = control.count_flags("the size of the data", changed)
        if ranks:
            check_ranks_agree(control, self.facts())
        return ranks > 0

    def _measure_training(self, training: LimitedLoader) -> None:
        length = training.source.length
        if not training.source.shares_known:
            # Each rank knows only the length of its own loader, and the longest loader ends the epoch.
            lengths = self._strategy.control.gather_objects(length)
            length = None if None in lengths else max(lengths)
        training.measure(length)

    def _measure_evaluation(self, stage: str) -> None:
        for loader in self.evaluation[stage]:
            loader.measure(loader.source.length)
        self.evaluation_lengths[stage] = [loader.length for loader in self.evaluation[stage]]

    # State in checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores of how the data is split and ordered."""
        return {**self.epoch_position.state_dict(self.train if self.trains else None), "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any], progress: Progress) -> None:
        """Restore the position in the data, after the counters and the seed, and load the loaders of the epoch."""
        if self.reload is not None:
            self.reload(progress.epoch)
        epoch_is_new = self.reload is not None and progress.batch_idx == 0
        self.epoch_position.load_state_dict(state, self.train, progress, new_loader=epoch_is_new)


def _are_several(loaders: Any) -> bool:
    return isinstance(loaders, CombinedLoader) or is_collection(loaders)


def _as_list(loaders: Any) -> list[Any]:
    """Return one or several evaluation loaders as a list."""
    if isinstance(loaders, CombinedLoader) and loaders.mode == "sequential":
        return loaders.flattened
    if is_collection(loaders):
        return list(loaders.values() if isinstance(loaders, Mapping) else loaders)
    return [loaders]


@dataclass(slots=True)
class EpochPosition:
    """How the current epoch's samples are distributed over ranks, so that a run can resume at any world size.

    Attributes:
        world_size: the number of ranks that the data is sharded over.
        epoch: the epoch that began with another sharding before the run was resumed; -1 for none.
        begins: the position from which the rest of that epoch is sharded anew.
        samples: the number of samples with which the saved epoch began; None if it is unknown.
        is_split_as_saved: whether the data is split as in the saved run, so that the run can resume bit for bit.
    """

    world_size: int = 1
    epoch: int = -1
    begins: EpochOffset = EPOCH_START
    samples: int | None = None
    is_split_as_saved: bool = False

    def origin(self, epoch: int) -> EpochOffset:
        """Return the position from which ``epoch`` is sharded."""
        return self.begins if epoch == self.epoch else EPOCH_START

    def state_dict(self, source: BatchSource | None) -> dict[str, Any]:
        """Return how the data is sharded. The number of samples used is in `Progress`."""
        return {
            "world_size": self.world_size,
            "stride": None if source is None else source.stride,
            "epoch": self.epoch,
            "begins": list(self.begins),
            "samples": None if source is None else source.samples,
        }

    def check_samples(self, source: BatchSource) -> None:
        """Check that an epoch that is resumed within has as many samples as it began with.

        Raises:
            ConfigurationError: the number of samples differs.
        """
        if None not in (self.samples, source.samples) and self.samples != source.samples:
            raise ConfigurationError(
                f"The epoch that is resumed began with {self.samples} training samples, and now has {source.samples}.",
                "the rest of the epoch cannot be read in the order in which it began: samples would be used twice or "
                "never.",
                "give the data set the size that it had, for example in on_fit_start or in load_state_dict of a data "
                "module, or resume from a checkpoint at an epoch's end.",
            )

    def load_state_dict(
        self, state: Mapping[str, Any], source: BatchSource, progress: Progress, new_loader: bool = False
    ) -> None:
        """Resume from ``state``. If the sharding differs, convert ``progress.batch_idx`` to the new batch size.

        Args:
            state: the state that `state_dict` returned.
            source: the batches of this run.
            progress: the counters, which are loaded already.
            new_loader: whether no batch of the epoch is used yet and the epoch has a new loader, perhaps with another
                batch size.
        """
        self.samples = state["samples"]
        same_stride = new_loader or source.stride == state["stride"]
        self.is_split_as_saved = self.world_size == state["world_size"] and same_stride
        if self.is_split_as_saved:
            self.epoch, self.begins = state["epoch"], EpochOffset(*map(int, state["begins"]))
        elif progress.batch_idx:
            done, before = progress.epoch_samples, progress.batch_idx
            # The number of micro-batches of the new size that contain the used samples.
            stride = source.stride
            number = -(-done // stride) if stride else -(-before * state["world_size"] // self.world_size)
            self.epoch, self.begins = progress.epoch, EpochOffset(done, number)
            progress.batch_idx = number
