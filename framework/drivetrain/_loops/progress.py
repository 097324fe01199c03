"""The counters of a run, the batch being processed, and the objects to which values and progress are reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain._distributed.control_plane import ControlPlane
    from drivetrain._loops.loader_lengths import Lengths
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


class ProgressReporter:
    """Calls callbacks at intervals with the number of micro-batches that are done.

    Args:
        callbacks: functions that are called with the number of micro-batches that are done.
        every: the number of micro-batches of an evaluation from one report to the next.
    """

    def __init__(self, callbacks: Sequence[Callable[[int], None]], every: int) -> None:
        self._callbacks = callbacks
        self.every = every
        self.before = 0
        """The number of micro-batches of the loaders that precede the current loader."""

    def report(self, batches: int) -> None:
        """Report ``batches`` micro-batches of the current loader, in addition to `before`."""
        for call in self._callbacks:
            call(self.before + batches)


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

    def reduce_epoch(self, control: ControlPlane, purpose: str) -> dict[str, Tensor]:
        """Return the epoch's values by name, reduced over ranks; warn about loaders whose length is wrong. Collective.

        Args:
            control: the control plane.
            purpose: what the ranks agree on, for errors.
        """
        reducing_ranks, ranks_with_mismatch = control.count_flags(
            purpose, self.metrics.wants_reduction(), self.lengths.has_mismatch
        )
        self.lengths.warn_together(ranks_with_mismatch)
        return self.metrics.reduce_epoch(together=reducing_ranks > 0 and control.world_size > 1)
