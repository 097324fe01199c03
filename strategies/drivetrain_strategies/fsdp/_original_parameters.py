"""Keeps the parameters that shards replace during a run, so that the same objects can be restored after the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.strategies import ControlPlane, copy_attributes_and_hooks
from drivetrain_strategies._deferred_init import DeferredModule
from drivetrain_strategies.fsdp._state import state_in_layout_of, write_value


class OriginalParameters:
    """The parameters of a module and of optimizers that were built before it is sharded.

    Args:
        module: the module, before it is sharded.
    """

    def __init__(self, module: nn.Module) -> None:
        self.by_id: dict[int, Original] = {}
        """Each parameter by the ``id`` of the original object, in the order of ``named_parameters()``."""
        self.shards: dict[int, nn.Parameter] = {}
        """The shard that replaces each parameter, by the ``id`` of the original object. Filled by `hand_over`."""
        self._optimizers: list[Optimizer] = []
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for child in module.modules():
            for attribute, parameter in child._parameters.items():
                if parameter is not None:
                    new = Original(names[id(parameter)], parameter, [], parameter.device)
                    self.by_id.setdefault(id(parameter), new).registrations.append((child, attribute))

    # When the module was sharded

    def materialize(
        self, deferred: DeferredModule, replicated: dict[str, nn.Parameter], device: torch.device, control: ControlPlane
    ) -> None:
        """Give parameters that are on the meta device their first values, one whole tensor at a time. Collective.

        Each rank keeps its shards, and whole values of the parameters in ``replicated``, which are replaced.
        """
        by_name = {original.name: original for original in self.by_id.values() if original.parameter.is_meta}
        for name, original in by_name.items():
            if name in replicated:
                empty = torch.empty_like(original.parameter, device=device)
                replicated[name] = nn.Parameter(empty, requires_grad=original.parameter.requires_grad)
                original.register(replicated[name])

        deferred.materialize(lambda name, value: write_value(by_name[name].current, value), device, control)

    def hand_over(self) -> None:
        """Give the shards the attributes and gradient hooks of the original parameters."""
        for key, original in self.by_id.items():
            if original.current is not original.parameter:
                self.shards[key] = original.current
                copy_attributes_and_hooks(original.parameter, original.current)

    def adopt(self, optimizers: Sequence[Optimizer]) -> None:
        """Replace the original parameters in ``optimizers`` by shards, and shard the optimizers' state."""
        self._optimizers += [optimizer for optimizer in optimizers if _replace(optimizer, self.shards)]

    # After the run

    @torch.no_grad()
    def restore(self) -> None:
        """Put the originals back into module and optimizers, on their first devices, with whole values. Collective."""
        for original in self.by_id.values():
            current: Any = original.current
            full_value = current.full_tensor() if isinstance(current, DTensor) else current.data
            device = torch.device("cpu") if original.device.type == "meta" else original.device
            original.restore(full_value.detach().to(device))
        originals = {id(shard): self.by_id[key].parameter for key, shard in self.shards.items()}
        for optimizer in self._optimizers:
            _replace(optimizer, originals)
        self.by_id, self._optimizers = {}, []

    @torch.no_grad()
    def leave_on_meta(self) -> None:
        """Register parameters on the meta device in place of shards. Does not communicate."""
        for original in self.by_id.values():
            current = original.current
            if isinstance(current, DTensor):
                original.restore(torch.empty(current.shape, dtype=current.dtype, device="meta"))


@dataclass(slots=True)
class Original:
    """A parameter and every module that registers it.

    Attributes:
        name: the parameter's first name in ``named_parameters()``.
        parameter: the original object. The object has no storage while the parameter is sharded.
        registrations: the modules that register the parameter, each with the attribute's name.
        device: the parameter's original device.
    """

    name: str
    parameter: nn.Parameter
    registrations: list[tuple[nn.Module, str]]
    device: torch.device

    @property
    def current(self) -> nn.Parameter:
        """The parameter that is currently registered in place of the original."""
        module, attribute = self.registrations[0]
        parameter = module._parameters[attribute]
        assert parameter is not None
        return parameter

    def register(self, value: nn.Parameter) -> None:
        """Register ``value`` wherever the original parameter was registered."""
        for module, attribute in self.registrations:
            module._parameters[attribute] = value

    def free_storage(self) -> None:
        """Free the original parameter's storage."""
        if not self.parameter.is_meta:
            self.parameter.data = torch.empty(0, dtype=self.parameter.dtype, device=self.parameter.device)

    def restore(self, full_value: torch.Tensor) -> None:
        """Register the original parameter again, with the unsharded values and the shard's current ``requires_grad``.

        If the original or the values are meta tensors, or the original is an instance of a subclass, a new parameter
        is registered instead.
        """
        requires_grad = self.current.requires_grad
        self.parameter.__dict__.update(self.current.__dict__)  # attributes that were set during the run
        if self.parameter.is_meta or full_value.is_meta or type(self.parameter) is not nn.Parameter:
            replacement = nn.Parameter(full_value, requires_grad=requires_grad)
            copy_attributes_and_hooks(self.parameter, replacement)
            self.parameter = replacement
        else:
            self.parameter.data = full_value
            self.parameter.requires_grad_(requires_grad)
        self.parameter.grad = None
        self.register(self.parameter)


@torch.no_grad()
def _replace(optimizer: Optimizer, successors: dict[int, nn.Parameter]) -> bool:
    """Replace each parameter whose ``id`` is in ``successors``. Return whether any parameter was replaced."""
    replaced = False
    for group in optimizer.param_groups:
        for position, parameter in enumerate(group["params"]):
            successor = successors.get(id(parameter))
            if successor is None or successor is parameter:
                continue
            replaced = True
            group["params"][position] = successor
            if parameter in optimizer.state:
                optimizer.state[successor] = state_in_layout_of(successor, optimizer.state.pop(parameter))
    return replaced
