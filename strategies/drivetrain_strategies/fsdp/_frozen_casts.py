"""Lets linear layers with frozen weights keep no half-precision cast of the weight until backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from drivetrain_strategies._activation_checkpointing import ForwardSwap


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


class _Cast(NamedTuple):
    """A weight that was multiplied in another dtype, and transposed, as `torch.nn.functional.linear` does."""

    weight: torch.Tensor
    dtype: torch.dtype


def _pack(weight: torch.Tensor, saved: torch.Tensor) -> torch.Tensor | _Cast:
    transposed = weight.t()
    if saved.dtype != weight.dtype and saved.shape == transposed.shape and saved.stride() == transposed.stride():
        return _Cast(weight, saved.dtype)
    return saved


def _unpack(packed: torch.Tensor | _Cast) -> torch.Tensor:
    return packed.weight.to(packed.dtype).t() if isinstance(packed, _Cast) else packed
