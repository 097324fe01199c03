"""The one place that reaches into `torch.utils.data.DataLoader`: a private copy with other parts, and its workers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, default_collate


class LoaderClone:
    """A copy of a user's `DataLoader` with some attributes exchanged; the user's own object stays as it is.

    The copy is not constructed anew: a subclass may take other arguments, and overrides of ``__iter__`` go on working.

    Args:
        loader: the user's.
        **attributes: what to exchange.
    """

    def __init__(self, loader: DataLoader[Any], **attributes: Any) -> None:
        self._loader = copy.copy(loader)
        self._running = _Running(self._loader)
        # Past `DataLoader.__setattr__`, which refuses these once it is constructed.
        vars(self._loader).update(attributes, _iterator=None, _get_iterator=self._running)

    @property
    def loader(self) -> DataLoader[Any]:
        """The copy."""
        return self._loader

    def iterate(self) -> Iterator[Any]:
        """Start an epoch; workers, if any, begin to read at once."""
        if not self._loader.persistent_workers:
            self._running.stop()
        return iter(self._loader)

    def close(self) -> None:
        """Shut the workers down, persistent ones too. Another epoch starts new ones."""
        self._running.stop()
        self._loader._iterator = None


def resized(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """Return a copy of a loader with another batch size. The data set and the sampler are the same objects."""
    apart = copy.copy(loader)
    batches = BatchSampler(loader.sampler, size, bool(loader.drop_last))
    # Past `DataLoader.__setattr__`, as above.
    vars(apart).update(batch_size=size, batch_sampler=batches, _iterator=None)
    return apart


def allocates_each_batch(loader: DataLoader[Any]) -> bool:
    """Whether every batch comes in memory of its own: put together by torch's own collation, or sent by a worker."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        return False  # which may do anything with what torch's gives
    return loader.num_workers > 0 or loader.collate_fn is default_collate


class _Running:
    """Makes torch's iterator for a loader and knows it, whatever a subclass's ``__iter__`` wraps around it.

    Both are held weakly: an epoch that the loop leaves early lets go of its workers then and there.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = weakref.ref(loader)
        self._iterator: weakref.ref[Any] | None = None

    def __call__(self) -> Any:
        loader = self._loader()
        assert loader is not None, "a loader calls this on itself"
        iterator = type(loader)._get_iterator(loader)
        self._iterator = weakref.ref(iterator)
        return iterator

    def stop(self) -> None:
        iterator = self._iterator() if self._iterator is not None else None
        self._iterator = None
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()
