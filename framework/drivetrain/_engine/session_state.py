"""RunState: what there is of a run on one rank. The engine's parts read it, and fill in what they set up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim import Optimizer

from drivetrain._config.secret_values import SecretFilter
from drivetrain._engine.data_cursor import Cursor
from drivetrain._engine.evaluation_buffers import BuffersAside
from drivetrain._engine.run_folder import RunFolder
from drivetrain._engine.stage_data import StageData
from drivetrain._engine.stage_loaders import Given
from drivetrain._engine.window_snapshot import WindowOpening
from drivetrain._loops.configured_optimizers import SchedulerConfig
from drivetrain._loops.hooks import HookTable, is_overridden
from drivetrain._loops.loader_lengths import Lengths
from drivetrain._loops.manual_step import ManualStep, OptimizerHandle
from drivetrain._loops.progress import Position, Progress
from drivetrain._loops.save_requests import SaveRequests
from drivetrain._loops.stopping import StopRequest
from drivetrain._loops.train import TrainLoop
from drivetrain._loops.trainables import Trainables
from drivetrain._metrics import MetricStore
from drivetrain.callback import Callback
from drivetrain.data._rng_replay import ReadAhead
from drivetrain.module._hyper_parameters import logged_hyper_parameters
from drivetrain.module.train_module import TrainModule
from drivetrain.run_context import RunContext
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain._engine.batches import BatchMover
    from drivetrain._loops.progress_reports import Pacing
    from drivetrain._loops.step import TrainStep
    from drivetrain._loops.windows import MicroBatch
    from drivetrain.data._batch_source import BatchSource

F = TypeVar("F", bound=Callable[..., Any])


class Unprofiled:
    """How a run is built that nobody profiles: from the parts as they are. `Profiling` wraps them."""

    train_loop: type[TrainLoop] = TrainLoop
    """The class of the training loop."""

    @property
    def wants_folder(self) -> bool:
        """Whether the run needs a folder for a profile."""
        return False

    def begin(self) -> None:
        """Begin to measure."""

    def compare_ranks(self) -> None:
        """Let the ranks tell each other what they measured. Collective."""

    def end(self) -> None:
        """Show and write what was measured, also of a run that failed."""

    def span(self, phase: str) -> AbstractContextManager[Any]:
        """Return a context that is a phase; for what comes once a run or an epoch."""
        return nullcontext(phase)

    def call(self, phase: str, function: F) -> F:
        """Return ``function`` as a phase."""
        del phase
        return function

    def hooks(self, table: HookTable) -> HookTable:
        """Return the hooks, each a phase."""
        return table

    def mover(self, move: BatchMover | None) -> BatchMover | None:
        """Return what brings batches to the device."""
        return move

    def source(self, source: BatchSource) -> BatchSource:
        """Return a source of training's micro-batches."""
        return source

    def evaluated(self, source: BatchSource) -> BatchSource:
        """Return a source of an evaluation's micro-batches."""
        return source

    def windows(
        self, micro_batches: Callable[[int, int], Iterator[MicroBatch]]
    ) -> Callable[[int, int], Iterator[MicroBatch]]:
        """Return what begins an epoch of training."""
        return micro_batches

    def step(self, step: TrainStep) -> TrainStep:
        """Return what trains on a micro-batch."""
        return step

    def knows_folder(self) -> None:
        """Take note that the run's folder is known."""

    def knows_data(self, loaders: Iterable[Any]) -> None:
        """Take note of the loaders, as the user gave them."""


class SessionState:
    """The state of one run of one stage. Parts that only some stages have are empty or None until they are set up.

    Args:
        trainer: whose settings hold; handed to callbacks.
        stage: "fit", "validate", "test" or "predict".
        module: what is run.
        given: the loaders or the data module.
        return_predictions: keep what ``predict_step`` returns.
        strategy: where.
        trial: nobody keeps what it trains: schedulers are left out, and callbacks that the module would bring.
    """

    def __init__(
        self,
        trainer: RunContext,
        stage: str,
        module: TrainModule,
        given: Given,
        return_predictions: bool,
        strategy: Strategy,
        trial: bool,
    ) -> None:
        self.trainer = trainer
        self.trial = trial
        self.stage = stage
        self.module = module
        self.given = given
        self.return_predictions = return_predictions
        self.strategy = strategy
        self.folder = RunFolder()
        self.progress = Progress()
        self.position = Position()
        self.cursor = Cursor()
        self.draws = ReadAhead(strategy.device)
        self.buffers = BuffersAside(module, strategy)
        self.saves = SaveRequests()
        self.seed = 0
        """Of the order of samples, the same on every rank."""
        self.loop: TrainLoop | None = None
        self.metrics = MetricStore(module)
        self.stop = StopRequest(strategy.control, None, None, None)
        self.opening: WindowOpening | None = None
        """What the window under way began with; None where windows have one micro-batch, or nobody asks to leave."""
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[SchedulerConfig] = []
        self.handles: list[OptimizerHandle] = []
        self.made_of: dict[str, Any] = {}
        """What a checkpoint says of the run's parts, by which one that goes on knows itself; see `resume_compatibility`."""
        self.closure = False
        """Whether the optimizer evaluates the loss anew within its step."""
        self.manual: ManualStep | None = None
        self.left_out = SecretFilter()
        """Takes secrets out of hyper-parameters, wherever they go."""
        self.callbacks: list[Callback] = []
        self.data: StageData | None = None
        self.reload: Callable[[int], None] | None = None
        """Brings the loaders of an epoch, where they come anew in the course of the run; else None."""
        self.first_length: int | None = None
        """Micro-batches of the first epoch, by which the run's steps are estimated where loaders come anew."""
        self.lengths = Lengths(strategy.control)
        self.estimate_was_read = False
        """Whether somebody, who may have built a schedule on it, has asked how many steps there will be."""
        self.sanity_checking = False
        self.validating = False
        """Whether a fit validates, its sanity check apart."""
        self.gradient_norm: torch.Tensor | None = None
        self.validate: Callable[[], list[dict[str, float]]] | None = None
        self.trained: set[str] = set()
        """The names of parameters that train, or have trained, as far as a checkpoint has asked."""
        self.base: dict[str, str] = {}
        """Checksums of parameters that have never trained, for checkpoints that leave them out."""
        self.pass_over_training_data: Callable[[], None] | None = None
        self.profiling = Unprofiled()
        """How what the loops are built from is timed."""
        self._hooks: HookTable | None = None
        self._trainables: Trainables | None = None

    @property
    def was_elsewhere(self) -> bool:
        """Whether this stands for a run that took place in other processes."""
        return self._hooks is None

    @property
    def hooks(self) -> HookTable:
        """Who overrode what; there from when the callbacks are known."""
        assert self._hooks is not None
        return self._hooks

    @property
    def trainables(self) -> Trainables:
        """Watches what trains; there from when the strategy holds the module of a fit."""
        assert self._trainables is not None
        return self._trainables

    def note_trained(self) -> set[str]:
        """Return the names of parameters that train or have trained, as far as anybody has looked."""
        if self._trainables is not None:
            self.trained |= self._trainables.trained
        return self.trained

    @property
    def leaves_on_signals(self) -> bool:
        """Whether a signal makes the run save and leave, alike on every rank."""
        return self.trainer.preemption_signals is not None

    def hyper_parameters(self, tell: bool = True) -> dict[str, Any]:
        """What loggers get of what the module and the data module were built with, without its secrets.

        Args:
            tell: warn of secrets that have not been named yet; on rank 0.
        """
        datamodule = self.given.datamodule
        of_data = {} if datamodule is None else logged_hyper_parameters(datamodule)
        together = {**of_data, **logged_hyper_parameters(self.module)}
        return self.left_out.take_out(together, tell)[0]

    def logger_call(self) -> Callable[[Mapping[str, torch.Tensor | float]], None] | None:
        """Return what sends numbers to the loggers, or None where there are none on this rank."""
        if not self.trainer.loggers or self.strategy.rank != 0 or self.sanity_checking:
            return None
        return self.profiling.call("loggers", self.trainer.log_metrics)

    def pacing(self) -> Pacing | None:
        """Return what tells callbacks how far a loop has come; None where none of them wants to know."""
        wanting = [one for one in self.callbacks if is_overridden("write_progress", one, Callback)]
        every = self.trainer.log_every_n_steps
        if not wanting or every <= 0:
            return None
        from drivetrain._loops.progress_reports import Pacing  # by runs that show how far they are

        return Pacing([partial(one.write_progress, self.trainer, self.module) for one in wanting], every)

    def data_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of how the data is dealt."""
        source = None if self.data is None else self.data.train
        return {**self.cursor.state_dict(source), "seed": self.seed}
