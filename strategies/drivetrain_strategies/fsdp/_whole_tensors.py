"""Gathers DTensors such that gradients are averaged over the ranks, and lets `DTensor` do so within a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

_FULL_TENSOR = DTensor.full_tensor


class Whole(torch.autograd.Function):
    """Gathers a DTensor. Averages its gradient over the ranks, as all gradients are."""

    @staticmethod
    def forward(context: Any, value: DTensor) -> torch.Tensor:
        context.mesh = value.device_mesh
        return _FULL_TENSOR(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> DTensor:
        mesh: DeviceMesh = context.mesh
        average = gradient / mesh.size()
        for dimension in range(mesh.ndim):
            dist.all_reduce(average, group=mesh.get_group(dimension))
        return DTensor.from_local(average, mesh, [Replicate()] * mesh.ndim, run_check=False)


def average_gradients_of_full_tensor(meshes: Callable[[], set[DeviceMesh]], whole: Callable[[Any], Any]) -> None:
    """Let ``DTensor.full_tensor()`` average gradients over the ranks. torch keeps those of this rank's batch.

    Args:
        meshes: returns the meshes over which parameters are sharded. Other DTensors are gathered as torch does it.
        whole: gathers a DTensor through `Whole`.
    """

    def full_tensor(self: Any, **options: Any) -> Any:
        if options or not (torch.is_grad_enabled() and self.requires_grad) or self.device_mesh not in meshes():
            return _FULL_TENSOR(self, **options)
        return whole(self)

    cast(Any, DTensor).full_tensor = full_tensor


def keep_local_gradients_of_full_tensor() -> None:
    """Undo `average_gradients_of_full_tensor`."""
    cast(Any, DTensor).full_tensor = _FULL_TENSOR
