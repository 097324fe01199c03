"""The objects to which a loop reports values and progress, and the reports to callbacks at intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain._distributed.control_plane import ControlPlane
    from drivetrain._loops.loader_lengths import Lengths
    from drivetrain._metrics import MetricStore


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
