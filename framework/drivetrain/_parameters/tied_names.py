"""Names of parameters and buffers that share one tensor."""

from __future__ import annotations

from itertools import chain

from torch import nn


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return ``{tied: first}``, where ``first`` is the tensor's first name among the parameters, then the buffers."""
    first_names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, value in chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    ):
        first_name = first_names.setdefault(id(value), name)
        if first_name != name:
            tied[name] = first_name
    return tied
