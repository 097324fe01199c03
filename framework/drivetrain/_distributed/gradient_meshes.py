"""Groups gradients by the device mesh over which they are sharded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer


def group_by_mesh(optimizers: Iterable[Optimizer]) -> tuple[list[Parameter], dict[Any, list[Parameter]]]:
    """Group the parameters that have a gradient.

    Grouping is needed because one operation cannot combine plain tensors and DTensors, or DTensors of two meshes.

    Returns:
        The parameters with plain gradients, and the parameters with DTensor gradients by `DeviceMesh`.
    """
    plain: list[Parameter] = []
    sharded: dict[Any, list[Parameter]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                # The attribute is checked rather than the class, since importing DTensor is slow.
                if type(gradient) is Tensor or (mesh := getattr(gradient, "device_mesh", None)) is None:
                    plain.append(parameter)
                else:
                    sharded.setdefault(mesh, []).append(parameter)
    return plain, sharded


def group_by_dtype(parameters: list[Parameter]) -> list[list[Tensor]]:
    """Return dense gradients and the values of coalesced sparse gradients, in one list per device and dtype."""
    buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None  # checked by `group_by_mesh`
        if gradient.is_sparse:
            # Rows may occur several times, and only their sum is the gradient.
            parameter.grad = gradient = gradient.coalesce()
            gradient = gradient._values()
        if gradient.numel() == 0:  # an empty tensor has no largest element
            continue
        buckets.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return list(buckets.values())


@torch.no_grad()
def multiply(optimizers: Iterable[Optimizer], factor: Tensor) -> None:
    """Multiply all gradients, or this rank's shards of them, in place by ``factor`` of shape ()."""
    plain, sharded = group_by_mesh(optimizers)
    buckets = group_by_dtype(plain)
    buckets += [[cast(Any, parameter.grad).to_local() for parameter in parameters] for parameters in sharded.values()]
    for bucket in buckets:
        torch._foreach_mul_(bucket, factor.to(bucket[0].device))
