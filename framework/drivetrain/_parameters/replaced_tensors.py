"""Replaces parameters and buffers of a module by new tensors, where assigning to ``data`` is impossible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def replace_tensors(module: nn.Module, values: Mapping[int, torch.Tensor]) -> None:
    """Replace parameters and buffers wherever the module registers them.

    A new parameter has the attributes, the gradient hooks and the ``requires_grad`` of the one that it replaces.

    Args:
        module: the module.
        values: the new values, by ``id`` of the tensor that each replaces.
    """
    successors: dict[int, torch.Tensor] = {}
    for layer in module.modules():
        for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            if tensor is not None and id(tensor) in values:
                if id(tensor) not in successors:
                    successors[id(tensor)] = _successor(tensor, values[id(tensor)])
                setattr(layer, name, successors[id(tensor)])


def _successor(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, nn.Parameter):
        return value
    successor = nn.Parameter(value, requires_grad=tensor.requires_grad)
    copy_attributes_and_hooks(tensor, successor)
    return successor


def copy_attributes_and_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give ``target`` the attributes and the gradient hooks that user code has given to the parameter ``source``."""
    target.__dict__.update(source.__dict__)
    for hook in (source._backward_hooks or {}).values():
        add_gradient_hook(target, hook)


def add_gradient_hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
    """Call ``parameter.register_hook``, which torch refuses on a frozen parameter."""
    requires_grad = parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.register_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(requires_grad)
