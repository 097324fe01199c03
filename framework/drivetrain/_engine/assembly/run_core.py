"""RunCore: the state of a run, which a `Session` fills in set-up and passes to the functions that build its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from drivetrain._config.secret_values import SecretFilter
from drivetrain._engine.assembly.run_callbacks import RunCallbacks
from drivetrain._engine.data_setup.run_data import RunData
from drivetrain._engine.evaluation_buffers import EvaluationBuffers
from drivetrain._engine.run_request import RunRequest
from drivetrain._loops.batch_mover import BatchMover
from drivetrain._loops.hooks import is_overridden
from drivetrain._loops.loop_log import LoopLog
from drivetrain._loops.stopping import StopRequest
from drivetrain._loops.train import TrainLoop
from drivetrain._loops.trainables import Trainables
from drivetrain._loops.window_snapshot import WindowSnapshot
from drivetrain._metrics import MetricStore
from drivetrain._module.hyper_parameters import logged_hyper_parameters
from drivetrain._run_state import RunState, not_set_yet
from drivetrain.callback import WantsRunFolder
from drivetrain.data import DataModule
from drivetrain.module.train_module import TrainModule
from drivetrain.run_context import RunContext
from drivetrain.strategies.strategy import StepRunner, Strategy


@dataclass(slots=True, kw_only=True)
class RunCore(RunState):
    """The state of a run with the parts that only the engine uses. Nearly every builder needs it.

    Attributes:
        request: the call of `Fit` that started the run.
        stop: collects requests to stop, and holds the minimums of steps and epochs that defer a stop.
        data: the data that the run reads.
        buffers: exchanges this rank's buffers for rank 0's during a validation within fit; None if the fit has none.
        callbacks: the callbacks, and the table of hooks that they and the module override.
        secrets: removes secrets from hyper-parameters before they are logged or saved.
        components: describes the module, data, optimizers and schedulers, to be compared with those of a resumed run.
        trainables: tracks which parameters train; None before the strategy has set up the module, and in other stages.
        snapshot: the state at the start of the current window; None unless a run may have to be saved within a window.
        runner: runs each step as the strategy requires and in the precision's forward context, once the module is set
            up.
        move: moves a batch to the device; None if batches stay where they are.
        loop: the training loop; None before it is built.
        sanity_names: the names that the sanity check has logged.
        first_gather: the epoch and window in which ``training_step`` first gathered tensors; None before.
        trainer: the `Fit`, as hooks see it.
        span: ``span(phase)`` is a context that the run's profiler times, for code that runs once in a run or an epoch.
    """

    request: RunRequest
    strategy: Strategy
    module: TrainModule = field(init=False)
    datamodule: DataModule | None = field(init=False)
    stop: StopRequest = field(init=False)
    data: RunData = field(init=False)
    callbacks: RunCallbacks = field(init=False)
    buffers: EvaluationBuffers | None = None
    secrets: SecretFilter = field(default_factory=SecretFilter)
    components: dict[str, Any] = field(default_factory=dict)
    trainables: Trainables | None = None
    snapshot: WindowSnapshot | None = None
    runner: StepRunner = not_set_yet
    move: BatchMover | None = None
    loop: TrainLoop | None = None
    sanity_names: set[str] = field(default_factory=set)
    first_gather: tuple[int, int] | None = None
    trainer: RunContext = field(init=False)
    span: Callable[[str], AbstractContextManager[Any]] = nullcontext

    def __post_init__(self) -> None:
        request, self.trainer = self.request, self.request.trainer
        self.stage, self.module, self.datamodule = request.stage, request.module, request.datamodule
        self.has_validation_step = is_overridden("validation_step", request.module, TrainModule)
        self.progress = request.counters or self.progress
        self.metrics = MetricStore(request.module)
        self.metrics.progress = self.progress
        self.stop = StopRequest(self.strategy.control, None, None, None)
        self.data = RunData(request, self.strategy)
        self.callbacks = RunCallbacks(self.trainer, request.module)
        if self.trainer.given_profiler is not None:
            self.span = self.trainer.given_profiler.profile

    @property
    def saves_on_signals(self) -> bool:
        """Whether a preemption signal makes the run save and exit; the same on every rank."""
        return self.trainer.preemption_signals is not None

    @property
    def profile_needs_folder(self) -> bool:
        """Whether the run needs a folder for the files of a profiler."""
        profiler = self.trainer.given_profiler
        return profiler is not None and profiler.dirpath is None

    def folder_users(self) -> list[object]:
        """Return the callbacks and the profiler that write to the run's folder."""
        wanting = [each for each in self.callbacks if isinstance(each, WantsRunFolder) and each.wants_run_folder]
        return [*wanting, *([self.trainer.given_profiler] if self.profile_needs_folder else [])]

    def logged_hyper_parameters(self, warn: bool = True) -> dict[str, Any]:
        """Return the hyper-parameters of the module and the data module that loggers receive, without secrets.

        Args:
            warn: whether to warn of secrets that are found for the first time.
        """
        from_data = {} if self.datamodule is None else logged_hyper_parameters(self.datamodule)
        return self.secrets.take_out({**from_data, **logged_hyper_parameters(self.module)}, warn)[0]

    def loop_log(self, sends: bool = True) -> LoopLog:
        """Return the log of a loop. Only rank 0 sends values to the loggers, and not if ``sends`` is False."""
        trainer, send = self.trainer, None
        if sends and trainer.loggers and self.strategy.rank == 0:
            send = trainer.log_metrics if self.span is nullcontext else self._send_in_phase
        every = max(0, trainer.log_every_n_steps)
        return LoopLog(self.metrics, self.data.lengths, send, self.callbacks.progress_writers(), every)

    def _send_in_phase(self, values: Mapping[str, torch.Tensor | float]) -> None:
        with self.span("loggers"):
            self.trainer.log_metrics(values)
