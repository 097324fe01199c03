"""Refuses weights that are not split by tensor parallelism but get another gradient on each rank of a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from drivetrain.errors import ConfigurationError, listed
from drivetrain.strategies import ControlPlane

TOLERANCE = 1e-3
"""The largest relative difference that is attributed to rounding, unless the gradient's dtype has a larger epsilon."""

ROUNDING = 1e-5
"""A difference up to this part of the largest gradient shows nothing, whatever its size relative to its own gradient.

Kernels may round differently on each rank, and the gradient of attention's key bias, for one, is rounding errors only.
"""

WINDOWS = 9
"""How many windows are looked at before gradients that show nothing, such as zeros, are given up."""


class UnsplitGradients:
    """Compares the gradients of unsplit parameters over each tensor-parallel group, until each was compared once.

    The ranks of a group read the same data, so they compute equal gradients of a parameter that none of them has only a
    part of. An unsplit parameter that acts on split heads gets the gradient of this rank's heads, and the ranks' copies
    would drift apart. A gradient of zeros shows nothing, nor does a difference of `ROUNDING` or an overflow of fp16.
    Such parameters are compared again in the next windows.

    Args:
        parameters: the module's parameters, by name, in the same order on every rank.
        group: the process group of the ranks that read the same data.
        control: the control plane.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: Any, control: ControlPlane) -> None:
        self._pending = {name: parameter for name, parameter in parameters.items() if not _is_split(parameter)}
        self._group = group
        self._control = control
        self._largest = 0.0  # squared norm of the largest gradient that was seen
        self.restart()

    def restart(self) -> None:
        """Look again for parameters that were not compared yet, such as those that train since now."""
        self._windows_left = WINDOWS

    @torch.no_grad()
    def compare(self) -> None:
        """Compare the gradients of a window, after the exchange over the data ranks. Collective.

        Raises:
            ConfigurationError: names the parameters whose gradients differ, on every rank.
        """
        compared = {name: parameter for name, parameter in self._pending.items() if parameter.requires_grad}
        if not compared or self._windows_left == 0:
            return
        squares = torch.stack([self._squares(parameter).cpu() for parameter in compared.values()])  # of offloaded ones
        # The shards of one parameter are on different ranks, so the squares are summed over all of them.
        totals = self._control.all_reduce_async(squares.reshape(-1))().reshape(-1, 2)
        if not totals.isfinite().all():
            return
        self._windows_left -= 1
        self._largest = max(self._largest, totals[:, 1].max().item())
        differing: dict[str, float] = {}
        for (name, parameter), (difference, size) in zip(compared.items(), totals.tolist(), strict=True):
            differs = difference > max(TOLERANCE, torch.finfo(parameter.dtype).eps) ** 2 * size
            if size == 0 or (differs and difference <= self._largest * ROUNDING**2):
                continue
            del self._pending[name]
            if differs:
                differing[name] = (difference / size) ** 0.5
        if differing:
            raise _differing_error(differing, dist.get_world_size(self._group))

    def _squares(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the squared norms of this rank's difference from the group's mean, and of this rank's gradient."""
        local = _local(parameter if parameter.grad is None else parameter.grad)
        local = torch.zeros_like(local) if parameter.grad is None else local
        mean = local.to(torch.promote_types(local.dtype, torch.float32), copy=True)
        dist.all_reduce(mean, group=self._group)
        mean /= dist.get_world_size(self._group)
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in (mean.sub_(local), local)]
        return torch.stack(norms).square()


def _is_split(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    placements = dict(zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True))
    return "tensor" in placements and not placements["tensor"].is_replicate()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _differing_error(differing: Mapping[str, float], ranks: int) -> ConfigurationError:
    return ConfigurationError(
        f"tensor_parallel={ranks}, but the gradients of {listed(list(differing))} differ between the ranks that share "
        f"the split layers, by up to {max(differing.values()):.2g} of their size.",
        "these weights are not split, so every rank must compute the same gradient. A weight that acts on this rank's "
        "heads only, as a norm of queries and keys does, gets only a part of it, and the copies would drift apart.",
        "in the plan for parallelize_module, give such a norm SequenceParallel(sequence_dim=2, use_local_output=True); "
        "see 'Tensor parallelism' in docs/strategies.md. The ranks of a group have to read the same data.",
    )
