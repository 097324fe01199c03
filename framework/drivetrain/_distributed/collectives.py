"""Collectives over the default process group, with the semantics that `Strategy` documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.errors import ConfigurationError, nearest

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # gloo has no ReduceOp.AVG, so `reduce` divides the sum
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def reduce(tensor: torch.Tensor, op: str = "mean") -> torch.Tensor:
    """Return a copy of ``tensor`` reduced over all ranks.

    Raises:
        ConfigurationError: ``op`` is not "mean", "sum", "max" or "min".
    """
    if op not in _OPERATIONS:
        raise ConfigurationError(
            f"reduce(op={op!r}).{nearest(str(op), _OPERATIONS)}",
            "op selects how the ranks' tensors are combined.",
            f"use one of {', '.join(_OPERATIONS)}.",
        )
    result = tensor.detach().clone()
    dist.all_reduce(result, _OPERATIONS[op])
    return result / dist.get_world_size() if op == "mean" else result


def broadcast(tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
    """Return a copy of the tensor of rank ``source``. All ranks pass tensors of the same shape and dtype."""
    result = tensor.detach().clone()
    dist.broadcast(result, source)
    return result


def broadcast_together(tensors: Sequence[torch.Tensor], group: Any = None) -> None:
    """Overwrite tensors with the tensors of the first rank of ``group``, with one packed broadcast per dtype.

    The first rank is rank 0 if ``group`` is None.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same_dtype in by_dtype.values():
        packed = torch.cat([tensor.detach().reshape(-1) for tensor in same_dtype])
        dist.broadcast(packed, group=group, group_src=0)
        with torch.no_grad():
            for tensor, part in zip(
                same_dtype, torch.split(packed, [tensor.numel() for tensor in same_dtype]), strict=True
            ):
                tensor.copy_(part.view_as(tensor))


@torch.no_grad()
def average_gradients(parameters: Iterable[torch.Tensor], group: Any = None) -> None:
    """Average the gradients of trainable parameters over the ranks of a group; None stands for all ranks. Collective.

    Gradients are packed into one all-reduce per dtype, and divided before it, so that the sum does not overflow if the
    mean does not overflow. A gradient that is missing on some ranks counts as zero there. One that is missing on all
    ranks remains None. Sparse gradients become dense.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    unused = [number for number, parameter in enumerate(trained) if parameter.grad is None]
    used = trained[0].new_ones(len(trained))  # created on the device, since a copy from the host would block
    for number in unused:
        used[number].zero_()
        trained[number].grad = torch.zeros_like(trained[number])
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {used.dtype: [used]}
    for parameter in trained:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for same_dtype in by_dtype.values():
        packed = torch.cat([tensor.reshape(-1) for tensor in same_dtype]).div_(dist.get_world_size(group))
        dist.all_reduce(packed, group=group)
        parts = torch.split(packed, [tensor.numel() for tensor in same_dtype])
        torch._foreach_copy_(same_dtype, [part.view_as(tensor) for part, tensor in zip(parts, same_dtype, strict=True)])
    if unused:  # reading the flags waits for the device
        used_anywhere = used.tolist()
        for number in unused:
            if not used_anywhere[number]:
                trained[number].grad = None


class _Gather(torch.autograd.Function):
    """All-gather with a backward pass that sums, over all ranks, the gradients of the tensor of each rank."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _gather(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total[dist.get_rank()]


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    gathered = tensor.new_empty((dist.get_world_size(), *tensor.shape))
    dist.all_gather(list(gathered), tensor.contiguous())
    return gathered


def all_gather(tensor: torch.Tensor, sync_grads: bool = False) -> torch.Tensor:
    """Return the tensors of all ranks, of shape (W, *tensor.shape), in rank order."""
    if sync_grads and tensor.requires_grad and torch.is_grad_enabled():
        gathered: torch.Tensor = _Gather.apply(tensor)  # type: ignore[no-untyped-call]
        return gathered
    return _gather(tensor.detach())
