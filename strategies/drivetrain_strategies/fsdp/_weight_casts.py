"""Lets autocast's half-precision casts of gathered weights live no longer than the weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from drivetrain_strategies._changed_forwards import ForwardSwap


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
                    empty = weight.new_empty(weight.shape[-1], 0, dtype=self._dtype, requires_grad=True)
                    try:
                        node: Any = torch.matmul(weight, empty).grad_fn
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


# Frozen weights


def save_no_frozen_casts(modules: Iterable[nn.Module], swap: ForwardSwap) -> None:
    """Let frozen linear layers save their gathered weight for backward, instead of autocast's cast of the weight.

    Autocast does not cache the cast of a weight that requires no gradient, so `WeightCasts` does not find this cast.
    Each product saves its own, and nothing else: its other operand is needed for the gradient of the weight only. The
    gathered weight is freed and gathered again by `fully_shard`, and cast again in backward, with the same bits.

    A second call handles layers that were frozen since the first. A layer that trains again runs as before.

    Args:
        modules: all modules to consider. Layers with a forward of their own or a subclass's are left alone.
        swap: replaces the forwards.
    """
    for module in modules:
        if type(module) is nn.Linear and "forward" not in module.__dict__:
            weight = module.weight
            if weight.dtype == torch.float32 and not weight.requires_grad:
                swap.put(module, _saving_no_cast)


def _saving_no_cast(original: Callable[..., Any]) -> Callable[..., Any]:
    # A bound method, unlike a closure, is bound to the copy when the layer is copied.
    return MethodType(forward, original.__self__)  # type: ignore[attr-defined]


def forward(layer: nn.Linear, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of ``layer``. Its name is that of the class's method, which pickle looks up instead."""
    weight = layer.weight
    if weight.requires_grad or type(weight) is not nn.Parameter or torch.compiler.is_compiling():
        return nn.Linear.forward(layer, *args, **kwargs)
    with ExitStack() as stack:
        with suppress(RuntimeError):  # torch.func permits no such hooks, so the cast is kept there
            stack.enter_context(saved_tensors_hooks(partial(_pack, weight), _unpack))
        return nn.Linear.forward(layer, *args, **kwargs)


class _FrozenCast(NamedTuple):
    """A weight that was multiplied in another dtype, and transposed, as `torch.nn.functional.linear` does."""

    weight: torch.Tensor
    dtype: torch.dtype


def _pack(weight: torch.Tensor, saved: torch.Tensor) -> torch.Tensor | _FrozenCast:
    transposed = weight.t()
    if saved.dtype != weight.dtype and saved.shape == transposed.shape and saved.stride() == transposed.stride():
        return _FrozenCast(weight, saved.dtype)
    return saved


def _unpack(packed: torch.Tensor | _FrozenCast) -> torch.Tensor:
    return packed.weight.to(packed.dtype).t() if isinstance(packed, _FrozenCast) else packed
