"""Seeds data-loading workers, so that their random draws depend only on seed, epoch, rank and micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from drivetrain._runtime.seed import derive_seed, seed_generators_of

_HOST = torch.device("cpu")
# This constant makes workers' seeds differ from other seeds that are derived from the same numbers.
_WORKER_SEED_SALT = 0x776F726B


MicroBatchKey = tuple[int, int]
"""The epoch and the number of the micro-batch that is requested from a worker."""


class KeyedIndices(list[int]):
    """The indices of one micro-batch, with the micro-batch's key."""

    __slots__ = ("key",)
    key: MicroBatchKey


class KeyedIndex(NamedTuple):
    """The index of a whole micro-batch in a data set of batches, with the micro-batch's key."""

    index: Any
    key: MicroBatchKey


class _DatasetProxy:
    """Proxy for a data set. Attributes that the proxy lacks are looked up in the data set.

    Args:
        dataset: the user's data set.
        seed: the seed of the run.
        rank: this process's data rank.
    """

    def __init__(self, dataset: Any, seed: int, rank: int) -> None:
        self.dataset = dataset
        self._seed = seed
        self._rank = rank

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        # Unpickling looks up dunder names before ``dataset`` is set.
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class SeededDataset(_DatasetProxy):
    """Proxy for a map-style data set that seeds the worker's generators before each micro-batch.

    Random draws are therefore the same for any number of workers, with persistent workers, and after a resume within an
    epoch.
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

    def _seed_for(self, key: MicroBatchKey) -> None:
        epoch, number = key
        seed_generators_of(_HOST, derive_seed(_WORKER_SEED_SALT, self._seed, epoch, self._rank, number))


class SeededIterable(_DatasetProxy):
    """Proxy for an iterable data set that seeds the worker's generators when an epoch begins.

    The draws continue from batch to batch, since the data set itself determines what a worker reads. The draws
    differ between ranks, workers and epochs, even with persistent workers, which torch seeds only once.

    Args:
        dataset: the user's data set.
        seed: the seed of the run.
        rank: this process's data rank.
        world_size: the number of data ranks, which `split_by_rank` uses.
    """

    def __init__(self, dataset: Any, seed: int, rank: int, world_size: int) -> None:
        super().__init__(dataset, seed, rank)
        self._world_size = world_size
        self._epoch = 0

    def set_epoch_number(self, epoch: int) -> None:
        """Set the number of the next epoch, in the process that starts the workers."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number = worker.id if worker is not None else 0
        from drivetrain._data.splitting import use_data_rank_in_worker

        use_data_rank_in_worker(self._rank, self._world_size)
        seed_generators_of(_HOST, derive_seed(_WORKER_SEED_SALT, self._seed, self._epoch, self._rank, number, 0))
        # A persistent worker keeps this object and creates one iterator per epoch.
        self._epoch += 1
        return iter(self.dataset)

    def __repr__(self) -> str:
        return repr(self.dataset)


class WorkerInit:
    """A ``worker_init_fn`` that moves the worker to a separate process group and then calls the user's function.

    A signal for the run's process group (Ctrl-C, or a scheduler's SIGTERM) would otherwise end the worker while the run
    still needs data to save a checkpoint. A worker still ends when its parent process ends. A worker that is not forked
    from the run leaves the group as soon as it has loaded this object.

    Args:
        user_init: the user's ``worker_init_fn``; None if there is none. In this function, `get_worker_info` returns the
            user's data set, not the proxy.
    """

    def __init__(self, user_init: Callable[[int], object] | None) -> None:
        self._user_init = user_init

    def __setstate__(self, state: dict[str, Any]) -> None:
        from drivetrain._data.worker_processes import is_starting, leave_process_group  # imported only in workers

        self.__dict__.update(state)
        if is_starting():
            leave_process_group()

    def __call__(self, worker_id: int) -> None:
        from drivetrain._data.worker_processes import leave_process_group

        leave_process_group()
        worker = get_worker_info()
        if worker is not None and isinstance(worker.dataset, _DatasetProxy):
            # `WorkerInfo` does not allow assignment. Users open files or split the data through its ``dataset``.
            object.__setattr__(worker, "dataset", worker.dataset.dataset)
        if self._user_init is not None:
            self._user_init(worker_id)
