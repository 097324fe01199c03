"""RunState: what one run consists of and has counted so far. The engine fills it, and `RunContext` shows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from drivetrain._metrics import MetricStore
from drivetrain._runs.run_folder import RunFolder
from drivetrain.checkpoint.save_request import SaveRequest
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain._format import CheckpointReader


@dataclass(slots=True)
class Progress:
    """The counters of a run. The loops write the attributes."""

    epoch: int = 0
    """Epochs completed."""
    global_step: int = 0
    """Optimizer steps made."""
    batch_idx: int = 0
    """Micro-batches of the current epoch that this rank has trained on."""
    micro_batches: int = 0
    """Micro-batches that this rank has trained on in all epochs."""
    samples_seen: int = 0
    """Samples that all ranks together have trained on."""
    epoch_samples: int = 0
    """Samples of the current epoch that all ranks together have trained on."""
    within_window: bool = False
    """Whether a window is open: micro-batches were trained on, and the optimizer step for them has not been made."""
    window: tuple[int, int] = (0, 0)
    """`batch_idx` and `samples_seen` when the current window opened."""
    cut_short: bool = False
    """Whether training ended before the data of the last epoch did, so that a resumed run continues that epoch."""

    def reset_to_window_start(self) -> None:
        """Reset the counters to the start of the open window, since when the weights and optimizers are unchanged."""
        if self.within_window:
            batch_idx, samples = self.window
            self.micro_batches -= self.batch_idx - batch_idx
            self.epoch_samples -= self.samples_seen - samples
            self.batch_idx, self.samples_seen, self.within_window = batch_idx, samples, False

    def state_dict(self) -> dict[str, int]:
        """Return the counters that a checkpoint stores."""
        unsaved_names = ("within_window", "window", "cut_short")
        return {name: value for name, value in asdict(self).items() if name not in unsaved_names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters that `state_dict` returned."""
        for name in self.state_dict():
            if name in state:
                setattr(self, name, int(state[name]))


class WeightedBatch(Protocol):
    """Training's micro-batch, as far as `CurrentBatch` reads it."""

    weight: float
    closes: bool


@dataclass(slots=True)
class CurrentBatch:
    """The running loop and the batch that it processes. After a failure, the attributes still name the failed batch."""

    loop: str | None = None
    """"training", "evaluation" or "prediction"; None between loops."""
    batch_idx: int = 0
    """The index of the current micro-batch. `Progress.batch_idx` counts those that were trained on."""
    micro_batch: WeightedBatch | None = None
    """Training's current micro-batch; None between epochs."""
    indices: Sequence[Any] | None = None
    """The data set indices of the current samples of prediction; None if they are unknown."""

    @property
    def weight(self) -> float:
        """The weight of training's current micro-batch, which is the number of items that the loss is a mean of."""
        return 0.0 if self.micro_batch is None else self.micro_batch.weight

    @property
    def closes(self) -> bool:
        """Whether training's current micro-batch is the last one of its window."""
        return self.micro_batch is None or self.micro_batch.closes

    def enter(self, loop: str) -> tuple[str | None, int]:
        """Set the running loop, at batch 0; return the previous loop and batch, to be passed to `leave`."""
        previous = self.loop, self.batch_idx
        self.loop, self.batch_idx = loop, 0
        return previous

    def leave(self, previous: tuple[str | None, int]) -> None:
        """Restore the loop and batch that `enter` returned."""
        self.loop, self.batch_idx = previous


@dataclass(slots=True)
class SchedulerConfig:
    """A learning-rate scheduler and when it steps.

    Attributes:
        scheduler: the scheduler.
        interval: "epoch" or "step" (optimizer steps).
        frequency: the number of intervals between two steps of the scheduler.
        monitor: the logged value that a plateau scheduler monitors.
        name: the name under which `LearningRateMonitor` logs the rate; None for a default name.
        strict: whether an error is raised if ``monitor`` was not logged. Otherwise the step is skipped, with a warning
            the first time.
        reduce_on_plateau: whether the scheduler's ``step`` takes the monitored value; None for whether it is a
            `ReduceLROnPlateau`.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    name: str | None = None
    strict: bool = True
    reduce_on_plateau: bool | None = None

    def __post_init__(self) -> None:
        if self.reduce_on_plateau is None:
            self.reduce_on_plateau = isinstance(self.scheduler, ReduceLROnPlateau)


@dataclass(frozen=True, slots=True)
class Optimization:
    """The optimizers of a fit as the strategy set them up; empty in other stages.

    Attributes:
        optimizers: the optimizers.
        schedulers: the learning rate schedulers, those of the strategy included.
        handles: the wrappers of the optimizers that ``module.optimizers()`` returns.
        closure: whether an optimizer evaluates the loss again within its step, as L-BFGS does.
    """

    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[SchedulerConfig] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    closure: bool = False


class ManualOptimization(Protocol):
    """The training step of manual optimization: runs backward, and toggles the optimizers' parameters."""

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate a loss of shape ()."""

    def toggle(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters require gradients."""

    def untoggle(self) -> None:
        """Restore ``requires_grad`` of all parameters to the values from before `toggle`."""


class StopRequests(Protocol):
    """The requests to end the run, as far as hooks make and read them."""

    signal: int
    preempted: int

    @property
    def is_asked(self) -> bool:
        """Whether a stop was requested."""

    def ask(self, reason: str | None) -> None:
        """Request a stop, or withdraw this rank's requests."""

    def ask_or_withdraw(self, owner: object, reason: str | None) -> None:
        """Request a stop that is obeyed after the minimums of the run, or withdraw it."""


@dataclass(slots=True, kw_only=True)
class StageLoaders:
    """The loaders of an entry point, as the user gave them, and their lengths."""

    loaders: tuple[Any, ...] = ()
    """The training loader(s) as the user passed them."""
    train_length: int | None = None
    """Expected micro-batches of a training epoch, the same on every rank; None if unknown."""
    evaluated: tuple[Any, ...] = ()
    """The evaluation loaders, as a flat sequence."""
    given_to_evaluate: dict[str, Any] = field(default_factory=dict)
    """The evaluation loader or collection of loaders that the user passed, by stage."""
    evaluation_lengths: dict[str, list[int | None]] = field(default_factory=dict)
    """The expected micro-batches of each evaluation loader, by stage; None if unknown."""


class CheckpointsOfRun(Protocol):
    """The checkpoints of a run, as far as hooks and the training loop ask for them."""

    waiting: list[Any]
    """What to do at the next point from which the run can be resumed."""
    rollback: Callable[[], None] | None
    """Loads an earlier checkpoint. The loop calls the function after leaving the epoch. None without a request."""
    in_epoch: bool
    """Whether an epoch's batches are read, or its end is processed: a save then waits for the next point."""
    opened: CheckpointReader | None
    """The checkpoint that the run starts from, if any."""

    def save(self, request: SaveRequest | Callable[[], SaveRequest | None]) -> None:
        """Write a checkpoint, at once or at the next point."""

    def carry_out_requests(self) -> None:
        """Write the requested checkpoints, unless a rollback was requested. Collective."""

    def save_before_leaving(self) -> None:
        """Write the checkpoint from which a run that ends early is resumed. Collective."""

    def newest_up_to(self, step: int) -> tuple[str, int] | None:
        """Return the path and step of this run's newest checkpoint at or before ``step``, or None. Collective."""

    def roll_back(self, path: str) -> None:
        """Request a rollback to a checkpoint of this run. Collective."""


def not_set_yet(*arguments: Any) -> Any:
    """Stand for a function that the session has not set yet."""
    raise AssertionError("the session has not set this function yet")


@dataclass(slots=True, kw_only=True)
class RunState:
    """The state of one call of `Fit.fit`, `validate`, `test` or `predict`. It stays readable after the call.

    The `RunState` of a `Fit` that has not run is empty.

    Attributes:
        stage: "fit", "validate", "test" or "predict"; "" before the first call.
        module: the user's module.
        datamodule: the data module, if one was passed.
        strategy: the strategy, which decides where and how the module runs.
        metrics: the values that the module and the callbacks log.
        progress: the counters that a checkpoint stores.
        current: the loop and the micro-batch being processed.
        sanity_checking: whether the sanity check before training is running.
        validating: whether a fit is validating, outside its sanity check.
        data: the loaders, once they are built.
        module_callbacks: the callbacks that ``configure_callbacks`` returned.
        has_validation_step: whether the module overrides ``validation_step``.
        optimization: the optimizers and schedulers, once they are set up.
        gradient_norm: the gradients' norm before they were last clipped; None if they have not been clipped yet.
        manual: the training step of manual optimization; None with automatic optimization, and outside training.
        stop: collects requests to stop.
        folder: the run's folder.
        checkpoints: opens, loads and writes the run's checkpoints.
        estimate_steps: returns the number of optimizer steps of the whole run; infinite without a bound.
        all_gather: gathers every tensor and number of a nested collection, once all ranks have reached the call.
        check_collective: waits for the other ranks to reach a call of this kind.
        log_histograms: sends histograms of a value, by name, step and number of bins.
        pass_over_data: runs the training step over an epoch's data without training.
    """

    stage: str = ""
    module: Any = None
    datamodule: Any = None
    strategy: Strategy | None = None
    metrics: MetricStore = field(default_factory=lambda: MetricStore(nn.Module()))
    progress: Progress = field(default_factory=Progress)
    current: CurrentBatch = field(default_factory=CurrentBatch)
    sanity_checking: bool = False
    validating: bool = False
    data: StageLoaders = field(default_factory=StageLoaders)
    module_callbacks: list[Any] = field(default_factory=list)
    has_validation_step: bool = False
    optimization: Optimization = field(default_factory=Optimization)
    gradient_norm: torch.Tensor | None = None
    manual: ManualOptimization | None = None
    stop: StopRequests | None = None
    folder: RunFolder = field(default_factory=RunFolder)
    checkpoints: CheckpointsOfRun | None = None
    estimate_steps: Callable[[], int | float] = not_set_yet
    all_gather: Callable[[Any, bool], Any] = not_set_yet
    check_collective: Callable[[str], None] = not_set_yet
    log_histograms: Callable[[str, Any, int, int], None] = not_set_yet
    pass_over_data: Callable[[], None] = not_set_yet


def with_module_callbacks(given: list[Any], from_module: list[Any]) -> list[Any]:
    """Return ``given`` and ``from_module``, without the callbacks in ``given`` whose class is in ``from_module``."""
    replaced = {type(callback) for callback in from_module}
    return [callback for callback in given if type(callback) not in replaced] + from_module
