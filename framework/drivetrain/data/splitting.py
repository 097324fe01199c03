"""Splits an iterable over the ranks and their data-loading workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

T = TypeVar("T")

GetDataRank = Callable[[], tuple[int, int]]

_get_data_rank: GetDataRank | None = None
"""A function that returns this process's data rank and the number of data ranks; None outside of a run."""


class SplitByRank(IterableDataset[T]):
    """The data set that `split_by_rank` returns. This process's part is determined when an iteration begins.

    Args:
        iterable: the iterable to split. Every rank iterates all of it and skips the elements of other ranks.
        by_worker: also split by data-loading worker.
    """

    is_split_by_rank = True
    """Marks data that is already split, so that ranks need not compare what they read."""

    def __init__(self, iterable: Iterable[T], by_worker: bool) -> None:
        self._iterable = iterable
        self._by_worker = by_worker

    def __iter__(self) -> Iterator[T]:
        rank, world_size = _get_data_rank() if _get_data_rank is not None else _process_group_rank()
        worker = get_worker_info() if self._by_worker else None
        worker_id, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return islice(self._iterable, worker_id * world_size + rank, None, world_size * num_workers)

    def set_epoch(self, epoch: int) -> None:
        """Call the iterable's ``set_epoch``, if it has one."""
        set_epoch = getattr(self._iterable, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def split_by_rank(iterable: Iterable[T], *, by_worker: bool = True) -> SplitByRank[T]:
    """Return this rank's and this data-loading worker's part of ``iterable``.

    With W ranks of N workers each, a worker gets every W*N-th element, so that each element is read exactly once. Pass
    an iterable data set, or call this function in the data set's ``__iter__`` with elements that are cheap to skip::

        loader = DataLoader(split_by_rank(Lines("corpus.txt")), batch_size=32, num_workers=4)

        def __iter__(self):
            for path in split_by_rank(self.paths):
                yield from read(path)

    Args:
        iterable: an iterable with the same elements in the same order on every rank. If it has a method
            ``set_epoch``, the method is called with the epoch's number.
        by_worker: also split by worker. Pass False if the iterable already splits by worker.

    Returns:
        An iterable data set without a length. Outside of a run, the rank is that in the process group; without a
        process group, the data set yields the whole iterable.
    """
    return SplitByRank(iterable, by_worker)


@contextmanager
def use_data_rank(get_data_rank: GetDataRank) -> Iterator[None]:
    """Context manager that makes `split_by_rank` use the data rank that ``get_data_rank`` returns."""
    global _get_data_rank
    previous, _get_data_rank = _get_data_rank, get_data_rank
    try:
        yield
    finally:
        _get_data_rank = previous


def use_data_rank_in_worker(rank: int, world_size: int) -> None:
    """Make `split_by_rank` use this data rank in this data-loading worker until the worker ends."""
    global _get_data_rank

    def get_data_rank() -> tuple[int, int]:
        return rank, world_size

    _get_data_rank = get_data_rank


def _process_group_rank() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
