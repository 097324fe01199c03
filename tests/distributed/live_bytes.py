"""Counts the bytes of all tensors that are alive at the same time: a rank's need, without the allocator's reserves."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class LiveBytes(TorchDispatchMode):
    """Counts every storage that an operation created or received within the context, for as long as it lives.

    Attributes:
        peak: the largest number of live bytes after any operation since `restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def now(self) -> int:
        """Return the live bytes; resized storages, as in FSDP's gathered parameters, count with their current size."""
        alive = {key: storage for key, one in self._storages.items() if (storage := one()) is not None}
        self._storages = {key: self._storages[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())

    def restart(self) -> None:
        """Reset the peak."""
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is called again with the local shards
        result = func(*args, **(kwargs or {}))
        for leaf in tree_flatten((args, kwargs, result))[0]:
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                self._storages.setdefault(id(storage), weakref.ref(storage))
        self.peak = max(self.peak, self.now())
        return result
