"""`split_by_rank`: each rank, and each of its data-loading workers, reads a part of an iterable of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

T = TypeVar("T")

Place = Callable[[], tuple[int, int]]

_place: Place | None = None
"""This process's rank, among how many that get different data; None outside of a run."""


class SplitByRank(IterableDataset[T]):
    """What `split_by_rank` returns. Which part it is, is asked for as an iteration begins.

    Args:
        iterable: what is split; it is gone through by every rank, which passes over what is not its own.
        by_worker: split by data-loading worker, too.
    """

    is_split_by_rank = True
    """Ranks need not look whether they read the same."""

    def __init__(self, iterable: Iterable[T], by_worker: bool) -> None:
        self._iterable = iterable
        self._by_worker = by_worker

    def __iter__(self) -> Iterator[T]:
        rank, world_size = _place() if _place is not None else _in_the_process_group()
        worker = get_worker_info() if self._by_worker else None
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return islice(self._iterable, number * world_size + rank, None, world_size * workers)

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to the iterable, if it wants to know it."""
        tell = getattr(self._iterable, "set_epoch", None)
        if callable(tell):
            tell(epoch)


def split_by_rank(iterable: Iterable[T], *, by_worker: bool = True) -> SplitByRank[T]:
    """Give each rank, and each of its data-loading workers, a part of ``iterable`` of its own.

    With W ranks of N workers each, every W*N-th element is one worker's; nothing is read twice, and nothing left out.
    It may be wrapped around an iterable data set, or used in one's ``__iter__`` around what is cheap to pass over::

        loader = DataLoader(split_by_rank(Lines("corpus.txt")), batch_size=32, num_workers=4)

        def __iter__(self):
            for path in split_by_rank(self.paths):
                yield from read(path)

    Args:
        iterable: anything that gives the same elements in the same order on every rank. If it has ``set_epoch``, the
            epoch is handed on to it.
        by_worker: False splits by rank alone, for an iterable that splits by worker itself.

    Returns:
        An iterable data set without a length. Outside of a run its part is that of the rank in the process group, and
        the whole where there is none.
    """
    return SplitByRank(iterable, by_worker)


@contextmanager
def read_from(place: Place) -> Iterator[None]:
    """Within it, what `split_by_rank` returns reads the part of the rank that ``place`` gives."""
    global _place
    before, _place = _place, place
    try:
        yield
    finally:
        _place = before


def read_in_worker(rank: int, world_size: int) -> None:
    """Do as `read_from` in a data-loading worker, to its end."""
    global _place

    def place() -> tuple[int, int]:
        return rank, world_size

    _place = place


def _in_the_process_group() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
