"""The counters of a run, the batch being processed, and the objects to which values and progress are reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain._loops.loader_lengths import Lengths
    from drivetrain._loops.progress_reports import ProgressReporter
    from drivetrain._loops.windows import MicroBatch
    from drivetrain._metrics import MetricStore


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


@dataclass(frozen=True, slots=True)
class LoopPosition:
    """Where training goes on after a save, besides the counters.

    Attributes:
        data_is_over: whether the epoch's last micro-batch was trained on.
        has_begun: whether the hooks that begin the epoch were called, although no micro-batch was trained on.
        left_after_last_step: whether a preemption came after ``max_steps`` but before the epoch's end.
        asked_to_stop: the reason of a stop that was requested before a preemption; None for none.
        validated_at: the number of the run's micro-batches after which validation last ran.
        validation_is_due: whether a validation comes next.
    """

    data_is_over: bool
    has_begun: bool
    left_after_last_step: bool
    asked_to_stop: str | None
    validated_at: int
    validation_is_due: bool


@dataclass(slots=True)
class Position:
    """The running loop and the batch that it processes. After a failure, the attributes still name the failed batch."""

    loop: str | None = None
    """"training", "evaluation" or "prediction"; None between loops."""
    batch_idx: int = 0
    """The index of the current micro-batch."""
    micro_batch: MicroBatch | None = None
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


@dataclass(frozen=True, slots=True)
class Reporting:
    """The objects to which a loop reports values, progress, and loaders whose length is wrong.

    Attributes:
        metrics: the logged values.
        log: sends a dict of numbers to the loggers; None without loggers.
        progress_reporter: reports the progress of an epoch to callbacks; None if no callback needs it.
        lengths: warns about loaders whose length proved wrong.
    """

    metrics: MetricStore
    log: Callable[[Mapping[str, Tensor | float]], None] | None
    progress_reporter: ProgressReporter | None
    lengths: Lengths
