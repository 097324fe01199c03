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


@torch.no_grad()
def multiply(optimizers: Iterable[Optimizer], factor: Tensor) -> None:
    """Multiply all gradients, or this rank's shards of them, in place by ``factor`` of shape ()."""
    plain, sharded = group_by_mesh(optimizers)
    gradients: list[Any] = [parameter.grad for parameter in plain]
    gradients += [cast(Any, parameter.grad).to_local() for parameters in sharded.values() for parameter in parameters]
    buckets: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        values = gradient._values() if gradient.is_sparse else gradient
        buckets.setdefault(gradient.device, []).append(values)
    for device, bucket in buckets.items():
        torch._foreach_mul_(bucket, factor.to(device))
