"""What a module is called with where there is no batch: an example of its input, as its user wrote it down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def example_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``forward`` that an example stands for, by position and by name.

    A mapping is arguments by name, a tuple or a list arguments by position, all else the one argument.
    """
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}


def has_forward(module: nn.Module) -> bool:
    """Whether ``module`` can be called: `torch.nn.Module` has a ``forward`` that only says that there is none."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward
