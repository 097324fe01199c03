"""Reports the progress of a loop to callbacks at intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

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
