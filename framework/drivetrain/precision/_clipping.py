"""Clips plain, sparse and sharded gradients together, by global norm or by value."""

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

from drivetrain._distributed.gradient_meshes import group_by_dtype, group_by_mesh
from drivetrain.errors import ConfigurationError, nearest

ALGORITHMS = ("norm", "value")


@torch.no_grad()
def clip_gradients(
    optimizers: Iterable[Optimizer], max_norm: float, algorithm: str = "norm", scale: Tensor | None = None
) -> Tensor:
    """Clip the gradients of all ``optimizers`` together, in place.

    The results are those of `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` on whole gradients, bit for bit if
    all gradients are plain and one optimizer has them. Unlike torch's functions, this function also supports plain and
    sharded gradients together, two device meshes, and sparse gradients. It waits for the device only to coalesce sparse
    gradients on an accelerator and to move the norms of gradients on several devices to one device.

    Args:
        optimizers: the optimizers whose gradients are clipped. The norm is over the gradients of all optimizers.
        max_norm: the largest allowed norm (``"norm"``) or magnitude of one element (``"value"``).
        algorithm: ``"norm"`` or ``"value"``.
        scale: the loss scale, of shape (), by which all gradients are divided in the same pass. Allowed only with
            ``"norm"``.

    Returns:
        Tensor of shape (): the total norm (largest magnitude for ``"value"``) before clipping, or 0 without gradients.

    Raises:
        ConfigurationError: ``algorithm`` is unknown.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigurationError(
            f"gradient_clip_algorithm={algorithm!r} does not exist.{nearest(str(algorithm), ALGORITHMS)}",
            fix="Use 'norm' or 'value'.",
        )
    order = 2.0 if algorithm == "norm" else math.inf
    plain, sharded = group_by_mesh(optimizers)
    buckets = group_by_dtype(plain)
    if len(buckets) == 1:
        norms = list(torch._foreach_norm(buckets[0], order))
    else:
        # The order in which norms of several dtypes are added decides the last bit, and torch's order is undocumented.
        norms = [get_total_norm([gradient for bucket in buckets for gradient in bucket], order)] if buckets else []
    for mesh, parameters in sharded.items():
        norms.append(_norm_over_shards(parameters) if algorithm == "norm" else _largest_over_shards(parameters, mesh))
    if not norms:
        return torch.tensor(0.0)
    device = norms[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), order)
    if algorithm == "value":
        for bucket in buckets:
            if bucket[0].is_complex():
                raise ConfigurationError(
                    f"gradient_clip_algorithm='value' with a gradient of dtype {bucket[0].dtype}.",
                    "complex numbers have no order, so torch cannot clip them by value.",
                    "use 'norm'.",
                )
            torch._foreach_clamp_min_(bucket, -float(max_norm))
            torch._foreach_clamp_max_(bucket, float(max_norm))
        for parameters in sharded.values():
            clip_grad_value_(parameters, max_norm)
        return total
    if scale is not None:
        total = total / scale.to(device)
    # As in torch, gradients are always multiplied, by 1 if there is nothing to clip, so that the host need not wait for
    # the device. `max_norm / ...` would compute the same coefficient with three more Python calls.
    coefficient = torch.clamp((total + 1e-6).reciprocal() * max_norm, max=1.0)
    if scale is not None:
        coefficient = coefficient / scale.to(device)
    # Each rank multiplies its own shards, without communication.
    buckets.extend(
        [cast(Any, parameter.grad).to_local() for parameter in parameters] for parameters in sharded.values()
    )
    for bucket in buckets:
        torch._foreach_mul_(bucket, coefficient.to(bucket[0].device))
    return total


def _norm_over_shards(parameters: list[Parameter]) -> Tensor:
    """Return the 2-norm over all shards of the DTensor gradients of one mesh, of shape (), on every rank."""
    norm: Any = get_total_norm([cast(Tensor, parameter.grad) for parameter in parameters])
    return cast(Tensor, norm.full_tensor())


def _largest_over_shards(parameters: list[Parameter], mesh: Any) -> Tensor:
    """Return the largest magnitude over all shards of the DTensor gradients of one mesh, of shape (), on every rank.

    Torch's infinity norm raises for an empty shard, which a rank gets if a parameter has fewer rows than ranks.
    """
    shards = [cast(Any, parameter.grad).to_local() for parameter in parameters]
    nonempty_shards = [shard for shard in shards if shard.numel() > 0]
    largest = (
        torch.stack(torch._foreach_norm(nonempty_shards, math.inf)).max()
        if nonempty_shards
        else shards[0].new_zeros(())
    )
    # The maximum of NaN and a number depends on the order of the two. Infinity gives the same result on every rank.
    largest = torch.nan_to_num(largest, nan=math.inf, posinf=math.inf)
    for dimension in range(mesh.ndim):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
    return largest
