"""Who is told, now and then, how far a loop has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

Item = TypeVar("Item")


class Pacing:
    """Tells how many micro-batches are made, every so many of them.

    Args:
        told: called with the micro-batches made.
        every: micro-batches of an evaluation between two calls.
    """

    def __init__(self, told: Sequence[Callable[[int], None]], every: int) -> None:
        self._told = told
        self._every = every
        self.before = 0
        """Micro-batches of the loaders before the one that `follow` goes through."""

    def tell(self, batches: int) -> None:
        """Tell how many micro-batches are made, besides those of `before`."""
        for call in self._told:
            call(self.before + batches)

    def follow(self, items: Iterator[Item]) -> Iterator[Item]:
        """Return ``items``; every so many of them it is told, and no Python call comes between the others."""
        return chain.from_iterable(self._parts(items))

    def _parts(self, items: Iterator[Item]) -> Iterator[Iterable[Item]]:
        done = 0
        for first in items:
            if done:
                self.tell(done)
            yield chain((first,), islice(items, self._every - 1))
            done += self._every
