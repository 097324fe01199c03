"""`WeightCasts`: frees autocast's half-precision casts of gathered weights together with the weights."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True, slots=True)
class _Cast:
    """The storage and layout of autocast's cast of a weight."""

    storage: weakref.ref[torch.UntypedStorage]
    parameter: Any
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


class WeightCasts:
    """Frees the casts of a unit's weights when the weights are freed, and restores them when these are gathered.

    Autocast casts a weight at its first use and caches the cast until the forward ends; a matrix product saves it for
    backward. `fully_shard` frees neither, so every rank would hold half the model's bytes in addition to its shards.
    As `fully_shard` does for weights, storage is freed and refilled under unchanged tensors: the graph, the order of
    gradient accumulation and every bit are those of plain autocast.

    Casts of frozen weights are not found: autocast does not cache them, only products with a backward save them.

    Args:
        parameters: torch's `FSDPParam` objects of the unit's weights.
        device_type: type of the device that the run computes on.
        dtype: autocast's dtype.
    """

    def __init__(self, parameters: Sequence[Any], device_type: str, dtype: torch.dtype) -> None:
        self._parameters = [fsdp_param for fsdp_param in parameters if _may_be_cast(fsdp_param)]
        self._device_type = device_type
        self._dtype = dtype
        self._casts: dict[int, _Cast] = {}
        self._empty_matrices: dict[tuple[int, torch.device], torch.Tensor] = {}

    def find(self) -> None:
        """Find autocast's casts of the gathered weights. Called after their use, within autocast.

        The cache cannot be queried. The product of a weight and a matrix without columns is free, and its backward
        node saves the cached cast. It must not run before the weights are used: autocast caches one cast per weight, in
        the dtype of its first use, and a forward may choose its own.
        """
        if not torch.is_autocast_enabled(self._device_type) or not torch.is_autocast_cache_enabled():
            return
        self._forget_freed()
        # Hide the product from activation checkpointing, which counts saved tensors, and from dispatch modes.
        with torch.enable_grad(), saved_tensors_hooks(_identity, _identity), _hidden_from_dispatch_modes():
            for fsdp_param in self._parameters:
                whole = fsdp_param._unsharded_param
                if whole.requires_grad and type(whole) is nn.Parameter:
                    try:
                        node: Any = torch.matmul(whole, self._empty_matrix_for(whole)).grad_fn
                    except RuntimeError:  # its cast has another dtype; leave it
                        continue
                    while node is not None and not hasattr(node, "_saved_self"):
                        node = node.next_functions[0][0]
                    if node is not None and node._saved_self is not None:
                        self._remember(fsdp_param, whole, node._saved_self)

    def drop(self) -> None:
        """Free the casts that are still referenced, as the weights are no longer gathered."""
        for cast in self._casts.values():
            storage = cast.storage()
            if storage is not None:
                storage.resize_(0)

    @torch.no_grad()
    def restore(self) -> None:
        """Cast the gathered weights again into the freed casts that are still referenced."""
        if not self._casts:
            return
        self._forget_freed()
        for cast in self._casts.values():
            storage = cast.storage()
            if storage is not None and storage.nbytes() == 0:
                storage.resize_(cast.nbytes)
                whole = cast.parameter._unsharded_param
                # A separate tensor over the storage keeps the write from changing autograd's version counter.
                view = torch.empty(0, dtype=cast.dtype, device=whole.device)
                view.set_(storage, 0, cast.size, cast.stride).copy_(whole)

    def _remember(self, parameter: Any, whole: torch.Tensor, cast: torch.Tensor) -> None:
        storage = cast.untyped_storage()
        known = self._casts.get(storage._cdata)
        if cast.dtype == whole.dtype or (known is not None and known.storage() is not None):
            return
        self._casts[storage._cdata] = _Cast(
            weakref.ref(storage), parameter, storage.nbytes(), cast.dtype, tuple(whole.shape), whole.stride()
        )

    def _forget_freed(self) -> None:
        self._casts = {key: cast for key, cast in self._casts.items() if cast.storage() is not None}

    def _empty_matrix_for(self, whole: torch.Tensor) -> torch.Tensor:
        key = whole.shape[-1], whole.device
        empty = self._empty_matrices.get(key)
        if empty is None:
            empty = self._empty_matrices[key] = torch.empty(
                key[0], 0, dtype=self._dtype, device=key[1], requires_grad=True
            )
        return empty


def _may_be_cast(parameter: Any) -> bool:
    """Return whether a weight may be an operand of a matrix product; vectors are too small to matter."""
    shard = parameter.sharded_param
    is_embedding = isinstance(parameter._module_info.module, nn.Embedding | nn.EmbeddingBag)
    return (
        shard.ndim > 1
        and shard.dtype == torch.float32
        and not (is_embedding and not parameter._module_info.shared_modules)
    )


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _hidden_from_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context without dispatch modes: selective checkpointing matches operations by position."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
