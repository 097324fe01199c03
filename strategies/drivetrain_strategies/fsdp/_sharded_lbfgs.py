"""Lets `torch.optim.LBFGS` step sharded parameters, by overriding private methods."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from drivetrain_strategies.fsdp._state import in_layout_of


class _ShardedLBFGS(LBFGS):
    """LBFGS that computes with whole gradients and directions on every rank and updates only this rank's shards.

    torch's class flattens parameters, which fails for shards of uneven size. The history consists of whole vectors, so
    every rank needs memory for the full history.
    """

    def _gather_flat_grad(self) -> torch.Tensor:
        parts = []
        for parameter in self._parameters_in_order():
            gradient: Any = parameter.grad
            if gradient is None:
                parts.append(torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device))
            else:
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                parts.append(whole.reshape(-1))
        return torch.cat(parts)

    def _add_grad(self, step_size: float, direction: torch.Tensor) -> None:
        offset = 0
        for parameter in self._parameters_in_order():
            part = in_layout_of(direction[offset : offset + parameter.numel()].view(parameter.shape), parameter)
            offset += parameter.numel()
            if isinstance(parameter, DTensor):
                parameter.to_local().add_(cast(DTensor, part).to_local(), alpha=step_size)
            else:
                parameter.add_(part, alpha=step_size)

    def _parameters_in_order(self) -> list[nn.Parameter]:
        return cast(list[nn.Parameter], self.param_groups[0]["params"])


def enable(optimizer: Optimizer) -> None:
    """Make an LBFGS optimizer step shards until `disable` is called. Other optimizers are left unchanged."""
    if type(optimizer) is LBFGS:
        optimizer.__class__ = _ShardedLBFGS


def disable(optimizer: Optimizer) -> None:
    """Undo `enable`."""
    if type(optimizer) is _ShardedLBFGS:
        optimizer.__class__ = LBFGS  # type: ignore[assignment]
