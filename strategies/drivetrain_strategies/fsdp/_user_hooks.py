"""Lets hooks of the user call the module or its layers, and assign weights, as under DDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from drivetrain_strategies.fsdp._data_assignment import DataAssignment
from drivetrain_strategies.fsdp._internals import Sharded

_WITHIN_STEPS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")


class UserHooks:
    """What hooks of the user may do with sharded parameters: assign to ``.data``, and call the module between steps.

    While a layer of the module runs outside of a step, the root unit's parameters are gathered. Inner units gather
    their own parameters. Within a step, the forward of the root unit does this.

    Args:
        module: the user's module.
        sharded: the sharded module.
    """

    def __init__(self, module: nn.Module, sharded: Sharded) -> None:
        self._layers = {id(layer) for layer in module.modules()}
        self._sharded = sharded
        self._depth = 0

    @contextmanager
    def context(self, name: str) -> Iterator[None]:
        """Context manager in which the hook ``name`` runs. Collective if the hook calls a layer."""
        with DataAssignment():
            if name in _WITHIN_STEPS:
                yield
                return
            handles = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()
                self._depth = 0

    def _enter(self, layer: nn.Module, inputs: Any) -> None:
        if id(layer) in self._layers:
            if self._depth == 0:
                self._sharded.root.unshard()
            self._depth += 1

    def _leave(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if id(layer) in self._layers:
            self._depth -= 1
            if self._depth == 0:
                self._sharded.reshard()
