"""Random draws in data-loading workers: a function of (seed, epoch, rank, micro-batch) and of nothing else."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from drivetrain._runtime.seed import derive_seed

# Tells these seeds from others derived from the same numbers.
_WORKER_DRAWS = 0x776F726B


class MicroBatch(NamedTuple):
    """Which micro-batch a request to a worker is for."""

    epoch: int
    number: int


class KeyedIndices(list[int]):
    """The indices of one micro-batch, with which one it is."""

    __slots__ = ("key",)
    key: MicroBatch


class KeyedIndex(NamedTuple):
    """The one index of a micro-batch that the data set holds whole."""

    index: Any
    key: MicroBatch


class _Seeded:
    """Stands before a data set and is, to whoever asks, that data set.

    Args:
        dataset: the user's data set.
        seed: the seed of the run.
        rank: this rank.
    """

    def __init__(self, dataset: Any, seed: int, rank: int) -> None:
        self.dataset = dataset
        self._seed = seed
        self._rank = rank

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        # Dunder lookups while unpickling come before ``dataset`` is there.
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class SeededDataset(_Seeded):
    """Stands before a map-style data set in the workers and seeds their generators before each micro-batch.

    What the worker drew before then does not matter: draws are the same for any number of workers, with persistent
    workers, and after a resume in the middle of an epoch.
    """

    def __getitem__(self, index: Any) -> Any:
        if type(index) is KeyedIndex:
            self._seed_for(index.key)
            return self.dataset[index.index]
        if type(index) is KeyedIndices:
            self._seed_for(index.key)
            return self.dataset[list(index)]
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        if type(indices) is KeyedIndices:
            self._seed_for(indices.key)
            indices = list(indices)
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]

    def _seed_for(self, key: MicroBatch) -> None:
        seed_generators(derive_seed(_WORKER_DRAWS, self._seed, key.epoch, self._rank, key.number))


class SeededIterable(_Seeded):
    """Stands before an iterable data set in a worker and seeds its generators as each epoch begins.

    An iterable data set decides by itself what a worker reads, so its draws go on from batch to batch. They differ
    between epochs (also with persistent workers, which torch seeds once), ranks and workers.

    Args:
        dataset: the user's data set.
        seed: the seed of the run.
        rank: this rank.
        world_size: among how many ranks `split_by_rank` splits.
    """

    def __init__(self, dataset: Any, seed: int, rank: int, world_size: int) -> None:
        super().__init__(dataset, seed, rank)
        self._world_size = world_size
        self._epoch = 0

    def begin(self, epoch: int) -> None:
        """Say which epoch it is, in the process that starts the workers."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number = worker.id if worker is not None else 0
        from drivetrain.data.splitting import read_in_worker

        read_in_worker(self._rank, self._world_size)
        seed_generators(derive_seed(_WORKER_DRAWS, self._seed, self._epoch, self._rank, number, 0))
        # A persistent worker keeps this object and asks it for one iterator an epoch.
        self._epoch += 1
        return iter(self.dataset)

    def __repr__(self) -> str:
        return repr(self.dataset)


class WorkerStart:
    """A ``worker_init_fn`` that shows the user's own one the user's own data set.

    It takes the worker out of the process group, so that a signal for the group (Ctrl-C, a scheduler's SIGTERM) leaves
    it alone: the run that is to save then still needs its data. A worker ends with its process all the same.

    Args:
        then: the user's ``worker_init_fn``, if there is one.
    """

    def __init__(self, then: Callable[[int], object] | None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        with contextlib.suppress(OSError, AttributeError):  # where there are no process groups
            os.setpgid(0, 0)
        worker = get_worker_info()
        if worker is not None and isinstance(worker.dataset, _Seeded):
            # `WorkerInfo` refuses assignment; users reach through it to open files or split the data.
            object.__setattr__(worker, "dataset", worker.dataset.dataset)
        if self._then is not None:
            self._then(worker_id)


def seed_generators(seed: int) -> None:
    """Seed Python's, torch's (CPU) and, where it is in use, NumPy's global generator."""
    random.seed(seed)
    # Not `torch.manual_seed`: for an accelerator not yet in use it queues a call, one more with every micro-batch.
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
