"""The half-precision casts of gathered weights live no longer than the weights: `WeightCasts`."""

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
    """Where autocast has put the cast of a weight, and how it lies there."""

    storage: weakref.ref[torch.UntypedStorage]
    parameter: Any
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


class WeightCasts:
    """Drops the casts of a unit's weights when the weights are dropped, and makes them anew when they are gathered.

    Autocast casts a weight at its first use and keeps the cast until the forward ends; a matrix product keeps it for
    its backward. `fully_shard` knows of neither: every rank would hold half the model's bytes beside its shards.
    As `fully_shard` does with the weights, storage is freed and filled again under tensors that stay what they are: the
    graph, and with it the order in which gradients are added up, is that of autocast alone, and so is every bit.

    Casts of frozen weights are not found: autocast does not keep these, only products that have a backward do.

    Args:
        parameters: torch's `FSDPParam` of the unit's weights.
        device_type: where the run computes.
        dtype: what autocast casts to.
    """

    def __init__(self, parameters: Sequence[Any], device_type: str, dtype: torch.dtype) -> None:
        self._parameters = [one for one in parameters if _may_be_cast(one)]
        self._device_type = device_type
        self._dtype = dtype
        self._found: dict[int, _Cast] = {}
        self._nothing: dict[tuple[int, torch.device], torch.Tensor] = {}

    def find(self) -> None:
        """Note where autocast has put the casts of the gathered weights. Called after their use, within autocast.

        Its cache cannot be asked. But whoever multiplies a weight by nothing, a matrix without columns, gets a product
        that takes no time, and whose backward holds the cast that is in the cache. Not before their use: autocast keeps
        one cast of a weight, in the dtype of whoever uses it first, and a forward may choose another for itself.
        """
        if not torch.is_autocast_enabled(self._device_type) or not torch.is_autocast_cache_enabled():
            return
        self._forget_those_gone()
        # The product is nobody's business: no checkpointing is to count what it saves, and no mode its operations.
        with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is), _unseen():
            for one in self._parameters:
                whole = one._unsharded_param
                if whole.requires_grad and type(whole) is nn.Parameter:
                    try:
                        node: Any = torch.matmul(whole, self._nothing_for(whole)).grad_fn
                    except RuntimeError:  # its cast is of another dtype, and stays
                        continue
                    while node is not None and not hasattr(node, "_saved_self"):
                        node = node.next_functions[0][0]
                    if node is not None and node._saved_self is not None:
                        self._note(one, whole, node._saved_self)

    def drop(self) -> None:
        """Free the casts that are still held: the weights are no longer gathered."""
        for cast in self._found.values():
            storage = cast.storage()
            if storage is not None:
                storage.resize_(0)

    @torch.no_grad()
    def restore(self) -> None:
        """Cast anew what was dropped and is still held: the weights are gathered, with the values of before."""
        if not self._found:
            return
        self._forget_those_gone()
        for cast in self._found.values():
            storage = cast.storage()
            if storage is not None and storage.nbytes() == 0:
                storage.resize_(cast.nbytes)
                whole = cast.parameter._unsharded_param
                # A tensor of its own over the storage: autograd need not know that it was written to.
                again = torch.empty(0, dtype=cast.dtype, device=whole.device)
                again.set_(storage, 0, cast.size, cast.stride).copy_(whole)

    def _note(self, parameter: Any, whole: torch.Tensor, cast: torch.Tensor) -> None:
        storage = cast.untyped_storage()
        known = self._found.get(storage._cdata)
        if cast.dtype == whole.dtype or (known is not None and known.storage() is not None):
            return
        self._found[storage._cdata] = _Cast(
            weakref.ref(storage), parameter, storage.nbytes(), cast.dtype, tuple(whole.shape), whole.stride()
        )

    def _forget_those_gone(self) -> None:
        self._found = {key: cast for key, cast in self._found.items() if cast.storage() is not None}

    def _nothing_for(self, whole: torch.Tensor) -> torch.Tensor:
        key = whole.shape[-1], whole.device
        nothing = self._nothing.get(key)
        if nothing is None:
            nothing = self._nothing[key] = torch.empty(key[0], 0, dtype=self._dtype, device=key[1], requires_grad=True)
        return nothing


def _may_be_cast(parameter: Any) -> bool:
    """Whether a weight may be multiplied with, and is large enough to matter: vectors are not."""
    shard = parameter.sharded_param
    looked_up = isinstance(parameter._module_info.module, nn.Embedding | nn.EmbeddingBag)
    return (
        shard.ndim > 1
        and shard.dtype == torch.float32
        and not (looked_up and not parameter._module_info.shared_modules)
    )


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _unseen() -> AbstractContextManager[Any]:
    """A context in which no dispatch mode sees what is done: selective checkpointing numbers operations."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
