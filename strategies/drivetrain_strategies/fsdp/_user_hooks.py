"""Lets hooks of the user call the module or its layers, and assign weights, as under DDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from drivetrain_strategies.fsdp._internals import Sharded
from drivetrain_strategies.fsdp._shard_writes import ShardWrites


class UserHooks:
    """What hooks of the user may do with sharded parameters: read and write them, and call the module.

    Hooks find the shards and their gradients. In manual optimization, hooks run within the forward of the root unit,
    whose parameters are therefore sharded while a hook runs. While a layer of the module runs in a hook, the root
    unit's parameters are gathered. Inner units gather their own parameters. Between forward and backward, the forward
    of the root unit does this.

    Args:
        module: the user's module.
        sharded: the sharded module.
    """

    def __init__(self, module: nn.Module, sharded: Sharded) -> None:
        self._layers = {id(layer) for layer in module.modules()}
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._sharded = sharded
        self._depth = 0

    @contextmanager
    def context(self, name: str, within_forward: bool, has_gradients: bool) -> Iterator[None]:
        """Context manager in which the hook ``name`` runs. Collective if the hook calls a layer, or within a forward.

        Args:
            name: the hook's name.
            within_forward: whether the root unit's forward has not ended, as in manual optimization.
            has_gradients: whether the shards have the gradients of the window.
        """
        with ShardWrites(self._names, has_gradients):
            if name == "on_before_backward":
                yield
                return
            if within_forward:
                self._sharded.reshard()
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
            if within_forward:
                self._sharded.gather_root()

    def _enter(self, layer: nn.Module, inputs: Any) -> None:
        if id(layer) in self._layers:
            if self._depth == 0:
                self._sharded.prepare_root()
                self._sharded.root.unshard()
            self._depth += 1

    def _leave(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if id(layer) in self._layers:
            self._depth -= 1
            if self._depth == 0:
                self._sharded.reshard()
