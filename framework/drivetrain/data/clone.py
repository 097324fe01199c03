"""The one place that reaches into `torch.utils.data.DataLoader`: a private copy with other parts, and its workers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


class LoaderClone:
    """A copy of a user's `DataLoader` with some attributes exchanged; the user's own object stays as it is.

    The copy is not constructed anew: a subclass may take other arguments, and overrides of ``__iter__`` go on working.

    Args:
        loader: the user's.
        **attributes: what to exchange.
    """

    def __init__(self, loader: DataLoader[Any], **attributes: Any) -> None:
        self._loader = copy.copy(loader)
        # Past `DataLoader.__setattr__`, which refuses these once it is constructed.
        vars(self._loader).update(attributes, _iterator=None)
        self._running: weakref.ref[Iterator[Any]] | None = None

    def iterate(self) -> Iterator[Any]:
        """Start an epoch; workers, if any, begin to read at once."""
        if not self._loader.persistent_workers:
            self._stop()
        iterator = iter(self._loader)
        # Weakly, so that an epoch that the loop leaves early lets go of its workers then and there.
        try:
            self._running = weakref.ref(iterator)
        except TypeError:
            # A subclass's `__iter__` may return a `map` or `zip`, which take no weak references.
            self._running = None
        return iterator

    def close(self) -> None:
        """Shut the workers down, persistent ones too. Another epoch starts new ones."""
        self._stop()
        iterator, self._loader._iterator = self._loader._iterator, None
        _shut_down(iterator)

    def _stop(self) -> None:
        iterator = self._running() if self._running is not None else None
        self._running = None
        if iterator is not None:
            _shut_down(iterator)


def _shut_down(iterator: Any) -> None:
    for name in ("_shutdown_workers", "close"):
        stop = getattr(iterator, name, None)
        if stop is not None:
            stop()
            return
