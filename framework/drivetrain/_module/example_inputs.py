"""Arguments of ``forward`` from example inputs, which are used when there is no batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def example_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of ``forward`` that an example specifies.

    A mapping holds keyword arguments, a tuple or list holds positional ones, and any other value is a single argument.
    """
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}


def has_forward(module: nn.Module) -> bool:
    """Return whether ``module`` implements ``forward``, because ``torch.nn.Module.forward`` only raises an error."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward
