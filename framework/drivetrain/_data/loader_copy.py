"""Copies of a `torch.utils.data.DataLoader` with some attributes replaced.

This is the only module that uses private attributes of `DataLoader` and of its workers.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, default_collate
from torch.utils.data._utils import worker as torch_worker


class LoaderClone:
    """A copy of a user's `DataLoader` with some attributes replaced; the user's object is not changed.

    The copy is made by `copy.copy` and not by the constructor, because a subclass may take other arguments. Methods
    that a subclass overrides, such as ``__iter__``, keep working.

    Args:
        loader: the user's loader.
        **attributes: the attributes to replace.
    """

    def __init__(self, loader: DataLoader[Any], **attributes: Any) -> None:
        self._loader = copy.copy(loader)
        self._tracker = _IteratorTracker(self._loader)
        # `DataLoader.__setattr__` does not allow changing these attributes.
        vars(self._loader).update(attributes, _iterator=None, _get_iterator=self._tracker)

    @property
    def loader(self) -> DataLoader[Any]:
        """The copy."""
        return self._loader

    def iterate(self) -> Iterator[Any]:
        """Start an epoch and return its iterator. Workers begin to read immediately."""
        if not self._loader.persistent_workers:
            self._tracker.stop()
        return iter(self._loader)

    def close(self) -> None:
        """Shut down the workers, including persistent workers. The next epoch starts new workers."""
        self._tracker.stop()
        self._loader._iterator = None


def resized(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """Return a copy of a loader with another batch size and the same data set and sampler."""
    clone = copy.copy(loader)
    batches = BatchSampler(loader.sampler, size, bool(loader.drop_last))
    # `DataLoader.__setattr__` does not allow changing these attributes.
    vars(clone).update(batch_size=size, batch_sampler=batches, _iterator=None)
    return clone


def allocates_each_batch(loader: DataLoader[Any]) -> bool:
    """Return whether every batch is newly allocated, by torch's default collation or by receiving it from a worker."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        return False  # A custom `__iter__` may reuse memory.
    return loader.num_workers > 0 or loader.collate_fn is default_collate


class _IteratorTracker:
    """Replaces ``DataLoader._get_iterator`` and remembers torch's iterator, which a subclass's ``__iter__`` may wrap.

    The references are weak, so that the workers are released immediately if the loop leaves an epoch early.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = weakref.ref(loader)
        self._iterator: weakref.ref[Any] | None = None

    def __call__(self) -> Any:
        loader = self._loader()
        assert loader is not None, "the loader itself makes this call"
        if loader.num_workers:
            from drivetrain._data.worker_processes import starting_workers  # imported only if there are workers

            with starting_workers(loader.multiprocessing_context):
                iterator = type(loader)._get_iterator(loader)
        else:
            iterator = type(loader)._get_iterator(loader)
        self._iterator = weakref.ref(iterator)
        return iterator

    def stop(self) -> None:
        iterator = self._iterator() if self._iterator is not None else None
        self._iterator = None
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


def replace_worker_info(info: Any) -> Any:
    """Make `get_worker_info` return ``info`` in this process; return what it returned before."""
    previous, torch_worker._worker_info = torch_worker._worker_info, info
    return previous
