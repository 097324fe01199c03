"""WeightCasts: frees autocast's half-precision casts of gathered weights together with the weights."""

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
    """Storage and layout of a cast, the half-precision copy that autocast made of a weight."""

    storage: weakref.ref[torch.UntypedStorage]
    parameter: Any
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


class WeightCasts:
    """Frees the casts of a unit's weights when the weights are freed, and restores the casts at the next gathering.

    Autocast casts a weight at its first use and caches the cast until the forward ends. A matrix product saves the cast
    for backward. `fully_shard` frees neither the cached nor the saved cast, so every rank would hold half the model's
    bytes in addition to its shards. Like `fully_shard` for weights, this class frees and refills storage under
    unchanged tensors, so that the graph, the order of gradient accumulation and every bit are those of plain autocast.

    Casts of frozen weights are not found, since autocast does not cache them; see `save_no_frozen_casts`.

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
        """Find autocast's casts of the gathered weights. Called after the weights were used, within autocast.

        The cache cannot be queried. Instead, each weight is multiplied by a matrix without columns at no cost, and
        the product's backward node saves the cached cast. The product must not run before the weight is used,
        because autocast caches one cast per weight, in the dtype of the weight's first use, and a forward may choose
        another dtype.
        """
        if not torch.is_autocast_enabled(self._device_type) or not torch.is_autocast_cache_enabled():
            return
        self._forget_freed()
        # Hide the product from activation checkpointing, which counts saved tensors, and from dispatch modes.
        with torch.enable_grad(), saved_tensors_hooks(_identity, _identity), _hidden_from_dispatch_modes():
            for fsdp_param in self._parameters:
                weight = fsdp_param._unsharded_param
                if weight.requires_grad and type(weight) is nn.Parameter:
                    try:
                        node: Any = torch.matmul(weight, self._empty_matrix_for(weight)).grad_fn
                    except RuntimeError:  # the cast has another dtype than the matrix and stays untracked
                        continue
                    while node is not None and not hasattr(node, "_saved_self"):
                        node = node.next_functions[0][0]
                    if node is not None and node._saved_self is not None:
                        self._remember(fsdp_param, weight, node._saved_self)

    def drop(self) -> None:
        """Free the storage of casts that are still referenced. Called when the weights are no longer gathered."""
        for cast in self._casts.values():
            storage = cast.storage()
            if storage is not None:
                storage.resize_(0)

    @torch.no_grad()
    def restore(self) -> None:
        """Cast the gathered weights again into the freed storage of casts that are still referenced."""
        if not self._casts:
            return
        self._forget_freed()
        for cast in self._casts.values():
            storage = cast.storage()
            if storage is not None and storage.nbytes() == 0:
                storage.resize_(cast.nbytes)
                weight = cast.parameter._unsharded_param
                # Writing through a separate tensor over the storage leaves autograd's version counter unchanged.
                view = torch.empty(0, dtype=cast.dtype, device=weight.device)
                view.set_(storage, 0, cast.size, cast.stride).copy_(weight)

    def _remember(self, parameter: Any, weight: torch.Tensor, cast: torch.Tensor) -> None:
        storage = cast.untyped_storage()
        known = self._casts.get(storage._cdata)
        if cast.dtype == weight.dtype or (known is not None and known.storage() is not None):
            return
        self._casts[storage._cdata] = _Cast(
            weakref.ref(storage), parameter, storage.nbytes(), cast.dtype, tuple(weight.shape), weight.stride()
        )

    def _forget_freed(self) -> None:
        self._casts = {key: cast for key, cast in self._casts.items() if cast.storage() is not None}

    def _empty_matrix_for(self, weight: torch.Tensor) -> torch.Tensor:
        key = weight.shape[-1], weight.device
        empty = self._empty_matrices.get(key)
        if empty is None:
            empty = self._empty_matrices[key] = torch.empty(
                key[0], 0, dtype=self._dtype, device=key[1], requires_grad=True
            )
        return empty


def _may_be_cast(parameter: Any) -> bool:
    """Return whether a weight may be an operand of a matrix product. Vectors are left out, since they are small."""
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
    """Return a context without dispatch modes, since selective checkpointing matches operations by position."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
