"""The objects to which a loop reports values and progress, and the reports to callbacks at intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain._loops.loader_lengths import Lengths
    from drivetrain._metrics import MetricStore

Item = TypeVar("Item")


class ProgressReporter:
    """Calls callbacks at intervals with the number of micro-batches that are done.

    Args:
        callbacks: functions that are called with the number of micro-batches that are done.
        every: the number of micro-batches of an evaluation from one report to the next.
    """

    def __init__(self, callbacks: Sequence[Callable[[int], None]], every: int) -> None:
        self._callbacks = callbacks
        self._every = every
        self.before = 0
        """The number of micro-batches of the loaders that precede the current loader."""

    def report(self, batches: int) -> None:
        """Report ``batches`` micro-batches of the current loader, in addition to `before`."""
        for call in self._callbacks:
            call(self.before + batches)

    def with_reports(self, items: Iterator[Item]) -> Iterator[Item]:
        """Return ``items``, with a report every ``every`` items and no Python call for the items between."""
        return chain.from_iterable(self._blocks(items))

    def _blocks(self, items: Iterator[Item]) -> Iterator[Iterable[Item]]:
        done = 0
        for first in items:
            if done:
                self.report(done)
            yield chain((first,), islice(items, self._every - 1))
            done += self._every


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
