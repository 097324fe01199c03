"""The parameters that a module had before shards took their places, so that the same objects can come back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(slots=True)
class Original:
    """A parameter, and every place where it stands.

    Attributes:
        name: the first in ``named_parameters()``.
        parameter: the object; its storage is dropped while shards stand for it.
        slots: modules and the names they know it by.
        device: where it lived.
    """

    name: str
    parameter: nn.Parameter
    slots: list[tuple[nn.Module, str]]
    device: torch.device

    @property
    def current(self) -> nn.Parameter:
        """What stands in its place now."""
        module, attribute = self.slots[0]
        found = module._parameters[attribute]
        assert found is not None
        return found

    def release(self) -> None:
        """Drop its storage."""
        if not self.parameter.is_meta:
            self.parameter.data = torch.empty(0, dtype=self.parameter.dtype, device=self.parameter.device)

    def put(self, value: nn.Parameter) -> None:
        """Let ``value`` stand in all its places."""
        for module, attribute in self.slots:
            module._parameters[attribute] = value

    def restore(self, whole: torch.Tensor) -> None:
        """Put the object back, holding ``whole``, as it trains or not now; one that never was real is made anew."""
        trains = self.current.requires_grad
        if self.parameter.is_meta or type(self.parameter) is not nn.Parameter:
            self.parameter = nn.Parameter(whole, requires_grad=trains)
        else:
            self.parameter.data = whole
            self.parameter.requires_grad_(trains)
        self.parameter.grad = None
        self.put(self.parameter)


def originals_of(module: nn.Module) -> list[Original]:
    """Every parameter of ``module`` with its places, ties once, in ``named_parameters()`` order."""
    found: dict[int, Original] = {}
    for prefix, child in module.named_modules():
        for attribute, parameter in child._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            known = found.setdefault(id(parameter), Original(name, parameter, [], parameter.device))
            known.slots.append((child, attribute))
    return list(found.values())
