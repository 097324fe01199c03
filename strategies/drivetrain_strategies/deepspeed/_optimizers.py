"""What a user's optimizer needs under DeepSpeed: its parameters again after the run, and gradients that it may keep."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.strategies import load_named_optimizer_state, named_optimizer_state
from drivetrain_strategies.deepspeed._state import State, whole_of


class AdoptedOptimizer:
    """Keeps an optimizer's parameters and state for the time after the run.

    State is gathered after the run only for an optimizer that is an attribute of the module. The state of other
    optimizers is discarded.

    Args:
        module: the module whose parameters the optimizer holds.
        optimizer: the optimizer before DeepSpeed's engine is built.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._module = module
        self._optimizer = optimizer
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._outlives_run = any(value is optimizer for value in vars(module).values())
        self._state: dict[str, Any] | None = named_optimizer_state(module, optimizer) if optimizer.state else None
        optimizer.state.clear()

    def load_into_masters(self, state: State) -> None:
        """Load the state that the optimizer had before the run, for the flat master weights. Collective."""
        if self._state is not None:
            state.load_optimizer(self._state)
            self._state = None

    def gather(self, state: State) -> None:
        """Gather the optimizer's state on the host if the optimizer is an attribute of the module. Collective."""
        if self._outlives_run:
            sharded = state.optimizer()
            named = {
                name: {key: _on_host(whole_of(value)) for key, value in values.items()}
                for name, values in sharded["state"].items()
            }
            self._state = {"state": named, "param_groups": sharded["param_groups"]}

    def restore(self) -> None:
        """Restore the parameters, and the state if it was gathered."""
        for group, parameters in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        self._optimizer.state.clear()
        if self._state is not None:
            load_named_optimizer_state(self._module, self._optimizer, self._state)


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


class GradientCopies:
    """Gives the optimizer copies of the gradients in each step, until `close`.

    DeepSpeed's flat gradients may be buffers that it uses again in the next window. An optimizer that keeps a gradient
    would find it overwritten.

    Args:
        optimizer: the torch optimizer that DeepSpeed steps.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._handles = (
            optimizer.register_step_pre_hook(self._copy),
            optimizer.register_step_post_hook(self._put_back),
        )

    def _copy(self, optimizer: Optimizer, *_: Any) -> None:
        flats = (flat for group in optimizer.param_groups for flat in group["params"])
        self._buffers = [(flat, flat.grad) for flat in flats if flat.grad is not None]
        for flat, buffer in self._buffers:
            flat.grad = buffer.clone()

    def _put_back(self, *_: Any) -> None:
        for flat, buffer in self._buffers:
            flat.grad = buffer
        self._buffers = []

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
