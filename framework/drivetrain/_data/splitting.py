"""Splits an iterable over the ranks and their data-loading workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import islice
from typing import TypeVar

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from drivetrain._data.loader_copy import replace_worker_info

T = TypeVar("T")
R = TypeVar("R")

GetDataRank = Callable[[], tuple[int, int]]

_get_data_rank: GetDataRank | None = None
"""A function that returns this process's data rank and the number of data ranks; None outside of a run."""

_is_reading: ContextVar[bool] = ContextVar("_is_reading", default=False)
"""Whether this thread is reading an element of an iterable that is split already."""


class SplitByRank(IterableDataset[T]):
    """The data set that `split_by_rank` returns. This process's part is determined when an iteration begins.

    While it reads the iterable, `get_worker_info` returns None in this process and another `split_by_rank` within the
    iterable returns all elements, since elements would be lost if the iterable were split twice.

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
        rank, world_size = _data_rank()
        worker = get_worker_info() if self._by_worker else None
        worker_id, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        first, step = worker_id * world_size + rank, world_size * num_workers
        elements = self._unsplit(lambda: islice(self._iterable, first, None, step))
        return self._read(elements)

    def _read(self, elements: Iterator[T]) -> Iterator[T]:
        # The consumer's code runs between two elements, and must see its own worker there.
        try:
            while True:
                yield self._unsplit(partial(next, elements))
        except StopIteration:
            return

    def _unsplit(self, read: Callable[[], R]) -> R:
        """Call ``read`` while this process is no data-loading worker and the only rank, as far as the iterable sees."""
        worker = replace_worker_info(None) if self._by_worker else None
        token = _is_reading.set(True)
        try:
            return read()
        finally:
            _is_reading.reset(token)
            if self._by_worker:
                replace_worker_info(worker)

    def set_epoch(self, epoch: int) -> None:
        """Call the iterable's ``set_epoch``, if it has one."""
        set_epoch = getattr(self._iterable, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def split_by_rank(iterable: Iterable[T], *, by_worker: bool = True) -> SplitByRank[T]:
    """Return this rank's and this data-loading worker's part of ``iterable``.

    With W ranks of N workers each, a worker gets every W*N-th element, so that each element is read exactly once. Pass
    an iterable data set, or call this function in the data set's ``__iter__`` with elements that are cheap to skip.
    While an element is read, the iterable sees no data-loading worker (`get_worker_info` returns None), so that an
    iterable that splits itself by worker is not split twice::

        loader = DataLoader(split_by_rank(Lines("corpus.txt")), batch_size=32, num_workers=4)

        def __iter__(self):
            for path in split_by_rank(self.paths):
                yield from read(path)

    Args:
        iterable: an iterable with the same elements in the same order on every rank. If it has a method
            ``set_epoch``, the method is called with the epoch's number.
        by_worker: also split by worker. False leaves that to the iterable, so that its workers skip no elements.

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


def _data_rank() -> tuple[int, int]:
    if _is_reading.get():
        return 0, 1
    if _get_data_rank is not None:
        return _get_data_rank()
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
