"""What a module is called with where there is no batch: an example of its input, as its user wrote it down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


def as_call(example: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``forward`` that an example stands for, by position and by name.

    Args:
        example: a mapping is arguments by name, a tuple or a list arguments by position, all else the one argument.
        device: where tensors go.
    """
    moved = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to(device), example)
    if isinstance(moved, Mapping):
        return (), dict(moved)
    return (tuple(moved) if isinstance(moved, tuple | list) else (moved,)), {}


def has_forward(module: nn.Module) -> bool:
    """Whether ``module`` can be called: `torch.nn.Module` has a ``forward`` that only says that there is none."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward
