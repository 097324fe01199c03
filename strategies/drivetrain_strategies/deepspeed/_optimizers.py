"""A user's optimizer while DeepSpeed steps it: its parameters are flat masters then, and its own again afterwards."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from drivetrain.strategies import load_named_optimizer_state, named_optimizer_state
from drivetrain_strategies.deepspeed._state import State, whole_of


class TakenOptimizer:
    """Remembers an optimizer's parameters and, where there is any already, its state.

    State is made whole after the run only for an optimizer that the module itself keeps: others end with the run.

    Args:
        module: by whose names.
        optimizer: before DeepSpeed sees it.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._module = module
        self._optimizer = optimizer
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._kept = any(value is optimizer for value in vars(module).values())
        self._state: dict[str, Any] | None = named_optimizer_state(module, optimizer) if optimizer.state else None
        optimizer.state.clear()

    def bring(self, state: State) -> None:
        """Give DeepSpeed's flat masters the state that the optimizer came with. Collective."""
        if self._state is not None:
            state.load_optimizer(self._state)
            self._state = None

    def gather(self, state: State) -> None:
        """Make the state whole, for an optimizer that outlives the run. Collective."""
        if self._kept:
            found = state.optimizer()
            named = {
                name: {key: whole_of(value) for key, value in values.items()} for name, values in found["state"].items()
            }
            self._state = {"state": named, "param_groups": found["param_groups"]}

    def give_back(self) -> None:
        """Put the parameters back, and the state where it was gathered."""
        for group, parameters in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        self._optimizer.state.clear()
        if self._state is not None:
            load_named_optimizer_state(self._module, self._optimizer, self._state)
