"""Clipping by global norm or by value, over plain, sparse and sharded gradients together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_value_, get_total_norm
from torch.optim import Optimizer

from drivetrain.errors import ConfigurationError, nearest
from drivetrain.precision._gradient_meshes import by_mesh

ALGORITHMS = ("norm", "value")


@torch.no_grad()
def clip_gradients(
    optimizers: Iterable[Optimizer], max_norm: float, algorithm: str = "norm", scale: Tensor | None = None
) -> Tensor:
    """Clip the gradients of all ``optimizers`` together, in place.

    Gives what `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` give on whole gradients, bit for bit where all
    are plain, and serves what they fail on: plain and sharded gradients side by side, two device meshes, sparse
    gradients. Nothing waits for the device, save that coalescing sparse gradients does on an accelerator, and that
    the norms of gradients on several devices travel to one.

    Args:
        optimizers: whose parameters' gradients are clipped; the norm is over all of them.
        max_norm: the largest norm, or with ``"value"`` the largest magnitude of one element.
        algorithm: ``"norm"`` or ``"value"``.
        scale: of shape (), what all gradients were multiplied by and are divided by in the same pass; for ``"norm"``.

    Returns:
        Tensor of shape (): the total norm before clipping, for ``"value"`` the largest magnitude; 0 without gradients.

    Raises:
        ConfigurationError: for another algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigurationError(
            f"gradient_clip_algorithm={algorithm!r} does not exist.{nearest(str(algorithm), ALGORITHMS)}",
            fix="Use 'norm' or 'value'.",
        )
    order = 2.0 if algorithm == "norm" else math.inf
    plain, sharded = by_mesh(optimizers)
    buckets = _buckets(plain)
    norms: list[Tensor] = []
    for bucket in buckets:
        norms.extend(torch._foreach_norm(bucket, order))
    for mesh, parameters in sharded.items():
        norms.append(_norm_over_shards(parameters) if algorithm == "norm" else _largest_over_shards(parameters, mesh))
    if not norms:
        return torch.tensor(0.0)
    device = norms[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), order)
    if algorithm == "value":
        for bucket in buckets:
            torch._foreach_clamp_min_(bucket, -float(max_norm))
            torch._foreach_clamp_max_(bucket, float(max_norm))
        for parameters in sharded.values():
            clip_grad_value_(parameters, max_norm)
        return total
    if scale is not None:
        total = total / scale.to(device)
    # As torch does it: multiplying always, by 1 where nothing is to clip, spares the device a question.
    # `max_norm / ...` is this very product, behind three calls of Python's.
    coefficient = torch.clamp((total + 1e-6).reciprocal() * max_norm, max=1.0)
    if scale is not None:
        coefficient = coefficient / scale.to(device)
    # What a rank holds of a sharded gradient is multiplied where it lies: no other rank is asked.
    buckets.extend([cast(Any, parameter.grad).to_local() for parameter in held] for held in sharded.values())
    for bucket in buckets:
        torch._foreach_mul_(bucket, coefficient.to(bucket[0].device))
    return total


def _buckets(parameters: list[Parameter]) -> list[list[Tensor]]:
    """Dense gradients, and the values of coalesced sparse ones, in lists of one device and dtype."""
    buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None  # as `by_mesh` found it
        if gradient.is_sparse:
            # Entries of one row may stand there several times: only their sum is the gradient.
            parameter.grad = gradient = gradient.coalesce()
            gradient = gradient._values()
        if gradient.numel() == 0:  # its largest element would be asked for
            continue
        key = (gradient.device, gradient.dtype)
        bucket = buckets.get(key)
        if bucket is None:
            buckets[key] = [gradient]
        else:
            bucket.append(gradient)
    return list(buckets.values())


def _norm_over_shards(parameters: list[Parameter]) -> Tensor:
    """The 2-norm over all shards of DTensor gradients of one mesh, as a plain tensor of shape () on every rank."""
    norm: Any = get_total_norm([cast(Tensor, parameter.grad) for parameter in parameters])
    return cast(Tensor, norm.full_tensor())


def _largest_over_shards(parameters: list[Parameter], mesh: Any) -> Tensor:
    """The largest magnitude over all shards of DTensor gradients of one mesh, likewise.

    By hand: torch's infinity norm refuses the empty shard that a rank gets of a parameter with fewer rows than ranks.
    """
    shards = [cast(Any, parameter.grad).to_local() for parameter in parameters]
    filled = [shard for shard in shards if shard.numel() > 0]
    largest = torch.stack(torch._foreach_norm(filled, math.inf)).max() if filled else shards[0].new_zeros(())
    # The maximum of NaN and a number depends on their order: as infinity it is the same on every rank.
    largest = torch.nan_to_num(largest, nan=math.inf, posinf=math.inf)
    for dimension in range(mesh.ndim):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
    return largest
