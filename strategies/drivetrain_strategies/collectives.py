"""Collectives over the default process group, in the shapes that `Strategy` promises."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from drivetrain.errors import ConfigurationError

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # gloo has no average
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def reduce(tensor: torch.Tensor, op: str = "mean") -> torch.Tensor:
    """Return a copy of ``tensor`` reduced over all ranks.

    Raises:
        ConfigurationError: ``op`` is not "mean", "sum", "max" or "min".
    """
    if op not in _OPERATIONS:
        raise ConfigurationError(f"reduce(op={op!r})", "", f"use one of {', '.join(_OPERATIONS)}.")
    result = tensor.detach().clone()
    dist.all_reduce(result, _OPERATIONS[op])
    return result / dist.get_world_size() if op == "mean" else result


def broadcast(tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
    """Return a copy of rank ``source``'s tensor, of the same shape and dtype everywhere."""
    result = tensor.detach().clone()
    dist.broadcast(result, source)
    return result


class _Gather(torch.autograd.Function):
    """All-gather whose backward gives each rank the sum, over the ranks, of the gradients of its own part."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _gather(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total[dist.get_rank()]


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    gathered = tensor.new_empty((dist.get_world_size(), *tensor.shape))
    dist.all_gather(list(gathered), tensor.contiguous())
    return gathered


def all_gather(tensor: torch.Tensor, sync_grads: bool = False) -> torch.Tensor:
    """Return shape (W, *tensor.shape), in rank order."""
    if sync_grads and tensor.requires_grad and torch.is_grad_enabled():
        gathered: torch.Tensor = _Gather.apply(tensor)
        return gathered
    return _gather(tensor.detach())
