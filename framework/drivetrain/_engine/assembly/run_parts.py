"""The parts of a run, which a `Session` holds and passes between the functions that build them.

`RunRequest` is complete before set-up begins, and set-up fills `RunCore`. `RunData` changes while a run reads its data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from drivetrain._config.secret_values import SecretFilter
from drivetrain._data.rng_replay import RngReplay
from drivetrain._engine.assembly.run_callbacks import RunCallbacks
from drivetrain._engine.data_setup.epoch_position import EpochPosition
from drivetrain._engine.data_setup.stage_data import StageData
from drivetrain._engine.data_setup.stage_loaders import DataArguments
from drivetrain._engine.evaluation_buffers import EvaluationBuffers
from drivetrain._loops.batch_mover import BatchMover
from drivetrain._loops.hooks import HookTable
from drivetrain._loops.loader_lengths import Lengths
from drivetrain._loops.progress_reports import ProgressReporter
from drivetrain._loops.stopping import StopRequest
from drivetrain._loops.train import TrainLoop
from drivetrain._loops.trainables import Trainables
from drivetrain._loops.window_snapshot import WindowSnapshot
from drivetrain._module.hyper_parameters import logged_hyper_parameters
from drivetrain._run_state import Progress, RunState, not_set_yet
from drivetrain._runs.run_folder import RunFolder
from drivetrain.data import DataModule
from drivetrain.module.train_module import TrainModule
from drivetrain.run_context import RunContext
from drivetrain.strategies.strategy import StepRunner, Strategy

if TYPE_CHECKING:
    from drivetrain._data.batch_source import BatchSource
    from drivetrain._data.limited_source import LimitedSource


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One call of `Fit.fit`, `validate`, `test` or `predict`.

    Attributes:
        trainer: the `Fit`, whose settings apply.
        stage: "fit", "validate", "test" or "predict".
        module: the module to run.
        given: the loaders or the data module that were passed.
        ckpt_path: the checkpoint to start from: a path or URL, "last", "best" or "auto"; None for a fresh start.
        return_predictions: whether to return the outputs of ``predict_step``.
        allow: the kinds of differences from the resumed run to accept: some of "data", "optimizer", "scheduler" and
            "module".
        trial: whether the run is a trial, whose weights are discarded. A trial has no schedulers and does not call
            `configure_callbacks`.
        averaged: whether to evaluate the averages in the checkpoint; None for the weights that its run evaluated with.
        counters: the counters of the preceding run, for an evaluation; None for new counters.
        previous_folder: the folder of the preceding run; None if there was none.
    """

    trainer: RunContext
    stage: str
    module: TrainModule
    given: DataArguments
    ckpt_path: str | None
    return_predictions: bool = True
    allow: tuple[str, ...] = ()
    trial: bool = False
    averaged: bool | None = None
    counters: Progress | None = None
    previous_folder: RunFolder | None = None


@dataclass(slots=True)
class RunData:
    """The data that a run reads, and the state of reading it.

    Attributes:
        given: the loaders or the data module that were passed, and the training loaders once they are built.
        lengths: the lengths, in micro-batches, of loaders without ``__len__``, as far as the lengths are known.
        rng_replay: the random generators' states by micro-batch, for loaders that read ahead.
        epoch_position: how the epoch is split over ranks.
        stage_data: the prepared loaders; None until they are built.
        seed: the seed of the order of samples, the same on every rank.
        reload: rebuilds the loaders of an epoch; None unless ``reload_dataloaders_every_n_epochs`` is set.
        first_length: micro-batches of the first epoch, used to estimate the run's steps if loaders are rebuilt.
        resized_at: the epoch in which the size of the training data last changed, and the steps made before it; None
            if the size is that of the start.
        estimate_was_read: whether user code has read `estimated_stepping_batches`, on which a schedule may depend.
    """

    given: DataArguments
    lengths: Lengths
    rng_replay: RngReplay
    epoch_position: EpochPosition = field(default_factory=EpochPosition)
    stage_data: StageData | None = None
    seed: int = 0
    reload: Callable[[int], None] | None = None
    first_length: int | None = None
    resized_at: tuple[int, int] | None = None
    estimate_was_read: bool = False

    @property
    def loaded(self) -> StageData:
        """The prepared loaders, once they are built."""
        assert self.stage_data is not None
        return self.stage_data

    @property
    def training(self) -> LimitedSource:
        """The training loader, once it is built."""
        training = self.loaded.training
        assert training is not None
        return training

    @property
    def train(self) -> BatchSource:
        """The source of training batches, once it is built."""
        return self.training.source

    @property
    def train_length(self) -> int | None:
        """Micro-batches of a training epoch; None if they are unknown or nothing is loaded."""
        return None if self.stage_data is None else self.stage_data.train_length

    @property
    def validates(self) -> bool:
        """Whether there are validation loaders."""
        return self.stage_data is not None and bool(self.stage_data.evaluation.get("validate"))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores of how the data is split and ordered."""
        training = None if self.stage_data is None else self.stage_data.training
        source = None if training is None else training.source
        return {**self.epoch_position.state_dict(source), "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any], progress: Progress) -> None:
        """Restore the position in the data, after the counters and the seed, and load the loaders of the epoch."""
        if self.reload is not None:
            self.reload(progress.epoch)
        epoch_is_new = self.reload is not None and progress.batch_idx == 0
        self.epoch_position.load_state_dict(state, self.train, progress, new_loader=epoch_is_new)


@dataclass(slots=True, kw_only=True)
class RunCore(RunState):
    """The state of a run with the parts that only the engine uses. Nearly every builder needs it.

    Attributes:
        request: the call of `Fit` that started the run.
        stop: collects requests to stop, and holds the minimums of steps and epochs that defer a stop.
        data: the data that the run reads.
        buffers: exchanges this rank's buffers for rank 0's during an evaluation within fit.
        callbacks: the callbacks, and the table of hooks that they and the module override.
        secrets: removes secrets from hyper-parameters before they are logged or saved.
        components: describes the module, data, optimizers and schedulers, to be compared with those of a resumed run.
        trainables: tracks which parameters train; None before the strategy has set up the module, and in other stages.
        snapshot: the state at the start of the current window; None unless a run may have to be saved within a window.
        runner: runs each step as the strategy requires, once the module is set up.
        move: moves a batch to the device; None if batches stay where they are.
        loop: the training loop; None before it is built.
        first_gather: the epoch and window in which ``training_step`` first gathered tensors; None before.
        trainer: the `Fit`, as hooks see it.
    """

    request: RunRequest
    module: TrainModule
    datamodule: DataModule | None
    strategy: Strategy
    stop: StopRequest
    data: RunData
    buffers: EvaluationBuffers
    callbacks: RunCallbacks
    secrets: SecretFilter = field(default_factory=SecretFilter)
    components: dict[str, Any] = field(default_factory=dict)
    trainables: Trainables | None = None
    snapshot: WindowSnapshot | None = None
    runner: StepRunner = not_set_yet
    move: BatchMover | None = None
    loop: TrainLoop | None = None
    first_gather: tuple[int, int] | None = None
    trainer: RunContext = field(init=False)

    def __post_init__(self) -> None:
        self.trainer = self.request.trainer
        self.metrics.progress = self.progress

    @property
    def hooks(self) -> HookTable:
        """The hooks that the module and the callbacks override."""
        return self.callbacks.hooks

    @property
    def ran_elsewhere(self) -> bool:
        """Whether this object represents a run that took place in other processes."""
        return not self.callbacks.collected

    @property
    def saves_on_signals(self) -> bool:
        """Whether a preemption signal makes the run save and exit; the same on every rank."""
        return self.trainer.preemption_signals is not None

    @property
    def profile_needs_folder(self) -> bool:
        """Whether the run needs a folder for the files of a profiler."""
        return self.trainer.profiles and self.trainer.profiler.dirpath is None

    def logged_hyper_parameters(self, warn: bool = True) -> dict[str, Any]:
        """Return the hyper-parameters of the module and the data module that loggers receive, without secrets.

        Args:
            warn: whether to warn of secrets that are found for the first time.
        """
        from_data = {} if self.datamodule is None else logged_hyper_parameters(self.datamodule)
        return self.secrets.take_out({**from_data, **logged_hyper_parameters(self.module)}, warn)[0]

    def logger_call(self) -> Callable[[Mapping[str, torch.Tensor | float]], None] | None:
        """Return the function that sends values to the loggers; None on ranks and in phases that do not log."""
        if not self.trainer.loggers or self.strategy.rank != 0 or self.sanity_checking:
            return None
        if not self.trainer.profiles:
            return self.trainer.log_metrics

        def log_in_phase(values: Mapping[str, torch.Tensor | float]) -> None:
            with self.span("loggers"):
                self.trainer.log_metrics(values)

        return log_in_phase

    def span(self, phase: str) -> AbstractContextManager[None]:
        """Return a context that the run's profiler times as a phase, for code that runs once in a run or an epoch."""
        return self.trainer.profiler.profile(phase) if self.trainer.profiles else nullcontext()

    def progress_reporter(self) -> ProgressReporter | None:
        """Return the object that reports a loop's progress to callbacks; None if none has `write_progress`."""
        return self.callbacks.progress_reporter(self.trainer.log_every_n_steps)
