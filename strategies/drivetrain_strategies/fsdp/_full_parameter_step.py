"""Steps optimizers whose update needs whole parameters (Muon, Adafactor). One parameter is gathered at a time."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, Muon

from drivetrain_strategies.fsdp._custom_step import CustomStep
from drivetrain_strategies.fsdp._state import in_layout_of

OPTIMIZERS = (Muon, Adafactor)


class FullParameterStep(CustomStep):
    """Gathers each sharded parameter with its gradient and state, steps the parameter, and shards the result.

    A step needs memory for one more parameter and gathers every parameter once. State with the parameter's shape stays
    sharded between steps. Other state, such as Adafactor's row and column statistics, is the same on every rank.

    Args:
        optimizer: an instance of one of `OPTIMIZERS`. `undo` restores the optimizer's ``step``.
    """

    def update(self) -> None:
        """Step the parameters one at a time. Collective."""
        optimizer = self._optimizer
        groups, state = optimizer.param_groups, optimizer.state
        try:
            for group in groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_parameter(group, parameter, state)
        finally:
            optimizer.param_groups, optimizer.state = groups, state

    @torch.no_grad()
    def _step_parameter(self, group: dict[str, Any], parameter: nn.Parameter, state: Any) -> None:
        optimizer = self._optimizer
        whole = nn.Parameter(_whole(parameter.detach()))
        whole.grad = _whole(parameter.grad)
        optimizer.param_groups = [{**group, "params": [whole]}]
        optimizer.state = defaultdict(dict)
        if parameter in state:
            optimizer.state[whole] = {key: _whole(value) for key, value in state[parameter].items()}
        self._original_step()
        updated = in_layout_of(whole.detach(), parameter)
        if isinstance(parameter, DTensor) and isinstance(updated, DTensor):
            parameter.to_local().copy_(updated.to_local())
        else:
            parameter.copy_(updated)
        state[parameter] = {
            key: in_layout_of(value, parameter)
            if isinstance(value, torch.Tensor) and value.shape == whole.shape
            else value
            for key, value in optimizer.state[whole].items()
        }


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value
