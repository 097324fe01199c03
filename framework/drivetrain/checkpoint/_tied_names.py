"""Names of parameters and buffers that share one tensor."""

from __future__ import annotations

from itertools import chain

from torch import nn


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return ``{tied: first}``, where ``first`` comes first in ``named_parameters()`` and ``named_buffers()``."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, value in chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    ):
        known = first.setdefault(id(value), name)
        if known != name:
            tied[name] = known
    return tied
