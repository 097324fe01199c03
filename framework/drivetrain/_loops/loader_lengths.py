"""Lengths that prove wrong: ``len(loader)`` is what a loader says, and only its data tell how many batches it has."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain, count, islice
from operator import itemgetter
from typing import Any

from drivetrain._distributed.control_plane import ControlPlane, spread
from drivetrain.data._sharding import BatchShard

logger = logging.getLogger("drivetrain")

Pairs = Iterator[tuple[Any, BatchShard]]

_FAR = 4
"""So many times its length a loader may give before that is said without waiting for its end, which may never come."""


class Lengths:
    """Takes note of loaders whose length proves wrong, and says so once for each of them, on rank 0.

    Args:
        control: the way to the other ranks, whose loaders may be their own.
    """

    def __init__(self, control: ControlPlane) -> None:
        self.control = control
        self._said: set[str] = set()
        self._wrong: dict[str, tuple[int, int, bool]] = {}

    @property
    def noticed(self) -> bool:
        """Whether this rank has something to say, for the ranks to count who has."""
        return bool(self._wrong)

    def note(self, loader: str, said: int | None, came: int, over: bool) -> None:
        """Compare what ``loader`` said with what came: all there is where it is ``over``, else so many at least."""
        if said is not None and loader not in self._said and (came != said if over else came > said):
            self._wrong[loader] = said, came, over

    def settle(self, ranks: int) -> None:
        """Say what was noted. Collective where ``ranks``, those that have noted something, are any."""
        if not ranks:
            return
        wrong, self._wrong = self._wrong, {}
        found = self.control.gather_objects(wrong)
        for loader in dict.fromkeys(name for one in found for name in one):
            self._say(loader, [one.get(loader) for one in found])

    def hurry(self, loader: str, said: int, came: int) -> None:
        """Say at once, where this is rank 0, that ``loader`` has given far more than it said. Not collective."""
        if self.control.rank == 0:
            self._say(loader, [(said, came, False)])

    def _say(self, loader: str, found: list[tuple[int, int, bool] | None]) -> None:
        if self.control.rank == 0 and loader not in self._said:
            counts = {one: ranks for one, ranks in spread(found).items() if one is not None}
            alike = sum(map(len, counts.values())) == len(found) and len(counts) == 1
            told = [
                f"{said} micro-batches an epoch, and {'' if over else 'at least '}{came} came"
                + ("" if alike else f" on rank(s) {ranks}")
                for (said, came, over), ranks in counts.items()
            ]
            logger.warning(
                "The length of the %s proved wrong: it said %s. Nothing was cut off or waited for; but what goes by "
                "that length (estimated_stepping_batches, parts of an epoch such as val_check_interval=0.5) is wrong "
                "as well. Look at __len__ of its sampler or data set; torch's estimate for an iterable data set knows "
                "nothing of what its workers get. Said once.",
                loader,
                "; ".join(told),
            )
        self._said.add(loader)


class Tally:
    """Knows whether the data of an epoch came to their end, and how many micro-batches there were.

    None of it is a Python call for each batch.

    Args:
        loader: what it is called.
        said: micro-batches of an epoch by its length, on this rank; None where nothing says.
        own: each rank counts its own.
        lengths: told.
    """

    def __init__(self, loader: str, said: int | None, own: bool, lengths: Lengths) -> None:
        self._loader = loader
        self._said = said
        self._own = own
        self._lengths = lengths
        self._followed = False
        self._counted: Iterator[int] = count()
        self._over = False

    def follow(self, pairs: Pairs, first: int) -> Pairs:
        """Return ``pairs``, an epoch's batches from ``first`` on, whose end is taken note of."""
        self._followed, self._over = True, False
        if self._own:
            self._counted = count(first)
            pairs = map(itemgetter(0), zip(pairs, self._counted, strict=False))
        if self._said is not None and self._said * _FAR > first:
            pairs = chain(islice(pairs, self._said * _FAR - first), self._beyond(pairs), pairs)
        return chain(pairs, self._end())

    def settle(self, trained: int) -> None:
        """Tell what came of the epoch, of which this rank has ``trained`` on so many micro-batches."""
        if not self._followed:
            return
        self._followed = False
        if self._over or not self._own:
            came = next(self._counted) if self._own else trained
            self._lengths.note(self._loader, self._said, came, self._over)

    def _end(self) -> Pairs:
        yield from ()
        self._over = True

    def _beyond(self, pairs: Pairs) -> Pairs:
        pair = next(pairs, None)
        if pair is not None:
            assert self._said is not None
            self._lengths.hurry(self._loader, self._said, self._said * _FAR + 1)
            yield pair
