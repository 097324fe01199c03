"""Replaces parameters and buffers of a module by new tensors, where assigning to ``data`` is impossible."""

from __future__ import annotations

from collections.abc import Mapping

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
    for hook in (tensor._backward_hooks or {}).values():
        successor.requires_grad_(True)  # torch accepts no hook on a frozen parameter
        successor.register_hook(hook)  # type: ignore[no-untyped-call]
    successor.requires_grad_(tensor.requires_grad)
    successor.__dict__.update(tensor.__dict__)
    return successor
