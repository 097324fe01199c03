"""Remembers the parameters that shards replace, so that the same objects can be restored after a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(slots=True)
class Original:
    """A parameter and every module that registers it.

    Attributes:
        name: its first name in ``named_parameters()``.
        parameter: the original object; its storage is freed while it is sharded.
        slots: the modules that register it, each with the attribute's name.
        device: its original device.
    """

    name: str
    parameter: nn.Parameter
    slots: list[tuple[nn.Module, str]]
    device: torch.device

    @property
    def current(self) -> nn.Parameter:
        """The parameter that is currently registered in its place."""
        module, attribute = self.slots[0]
        parameter = module._parameters[attribute]
        assert parameter is not None
        return parameter

    def release(self) -> None:
        """Free its storage."""
        if not self.parameter.is_meta:
            self.parameter.data = torch.empty(0, dtype=self.parameter.dtype, device=self.parameter.device)

    def put(self, value: nn.Parameter) -> None:
        """Register ``value`` in all its slots."""
        for module, attribute in self.slots:
            module._parameters[attribute] = value

    def restore(self, full_value: torch.Tensor) -> None:
        """Register the original parameter again, with the unsharded values and the shard's current ``requires_grad``.

        A meta tensor is replaced by a new parameter.
        """
        requires_grad = self.current.requires_grad
        if self.parameter.is_meta or type(self.parameter) is not nn.Parameter:
            self.parameter = nn.Parameter(full_value, requires_grad=requires_grad)
        else:
            self.parameter.data = full_value
            self.parameter.requires_grad_(requires_grad)
        self.parameter.grad = None
        self.put(self.parameter)


def originals_of(module: nn.Module) -> list[Original]:
    """Return each parameter of ``module`` once, with its slots, in ``named_parameters()`` order."""
    originals: dict[int, Original] = {}
    for prefix, child in module.named_modules():
        for attribute, parameter in child._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            original = originals.setdefault(id(parameter), Original(name, parameter, [], parameter.device))
            original.slots.append((child, attribute))
    return list(originals.values())
