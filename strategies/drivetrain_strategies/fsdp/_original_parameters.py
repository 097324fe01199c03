"""Keeps the parameters that shards replace during a run, so that the same objects can be restored after the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


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

    def free_storage(self) -> None:
        """Free the original parameter's storage."""
        if not self.parameter.is_meta:
            self.parameter.data = torch.empty(0, dtype=self.parameter.dtype, device=self.parameter.device)

    def hand_over(self) -> None:
        """Give the parameter that is now registered the attributes and gradient hooks of the original one."""
        current = self.current
        if current is not self.parameter:
            copy_attributes(self.parameter, current)
            add_gradient_hooks(current, gradient_hooks(self.parameter))

    def register(self, value: nn.Parameter) -> None:
        """Register ``value`` wherever the original parameter was registered."""
        for module, attribute in self.registrations:
            module._parameters[attribute] = value

    def restore(self, full_value: torch.Tensor) -> None:
        """Register the original parameter again, with the unsharded values and the shard's current ``requires_grad``.

        If the original or the values are meta tensors, or the original is an instance of a subclass, a new parameter
        is registered instead.
        """
        requires_grad = self.current.requires_grad
        copy_attributes(self.current, self.parameter)  # those that were set during the run
        if self.parameter.is_meta or full_value.is_meta or type(self.parameter) is not nn.Parameter:
            replacement = nn.Parameter(full_value, requires_grad=requires_grad)
            copy_attributes(self.parameter, replacement)
            add_gradient_hooks(replacement, gradient_hooks(self.parameter))
            self.parameter = replacement
        else:
            self.parameter.data = full_value
            self.parameter.requires_grad_(requires_grad)
        self.parameter.grad = None
        self.register(self.parameter)


def copy_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Set the attributes that user code has set on ``source`` also on ``target``."""
    target.__dict__.update(source.__dict__)


def gradient_hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """Return the hooks of ``parameter.register_hook``."""
    return list((parameter._backward_hooks or {}).values())


def add_gradient_hooks(parameter: torch.Tensor, hooks: Sequence[Callable[[torch.Tensor], Any]]) -> None:
    """Register hooks on a parameter, which may be frozen."""
    requires_grad = parameter.requires_grad
    for hook in hooks:
        parameter.requires_grad_(True)  # torch accepts no hook on a frozen parameter
        parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    if hooks:
        parameter.requires_grad_(requires_grad)


def original_parameters_of(module: nn.Module) -> list[Original]:
    """Return an `Original` for each parameter of ``module``, in the order of ``named_parameters()``."""
    originals: dict[int, Original] = {}
    for prefix, child in module.named_modules():
        for attribute, parameter in child._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            original = originals.setdefault(id(parameter), Original(name, parameter, [], parameter.device))
            original.registrations.append((child, attribute))
    return list(originals.values())


@torch.no_grad()
def restore_whole_parameters(originals: Sequence[Original]) -> None:
    """Put the original parameters back on their original devices, with gathered values. Collective."""
    for original in originals:
        current: Any = original.current
        full_value = current.full_tensor() if isinstance(current, DTensor) else current.data
        device = torch.device("cpu") if original.device.type == "meta" else original.device
        original.restore(full_value.detach().to(device))


@torch.no_grad()
def leave_on_meta(originals: Sequence[Original]) -> None:
    """Register parameters on the meta device in place of shards. Does not communicate."""
    for original in originals:
        current = original.current
        if isinstance(current, DTensor):
            original.restore(torch.empty(current.shape, dtype=current.dtype, device="meta"))
