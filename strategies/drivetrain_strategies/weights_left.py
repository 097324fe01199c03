"""Which modules hold no weights because shards of them were left on several ranks. Imports nothing that takes long."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from drivetrain.errors import ConfigurationError


@dataclass(slots=True)
class Part:
    """One rank's part of a parameter, and how to tell that nobody has written to what stands for the whole."""

    name: str
    local: torch.Tensor
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    version: int
    address: int


left: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], list[Part]]] = weakref.WeakKeyDictionary()
"""By module: the sizes of the mesh, and this rank's parts."""


def refuse_weights_left(module: nn.Module) -> None:
    """Refuse a module whose weights are NaN, its shards being left on several ranks.

    Raises:
        ConfigurationError: says how to get them.
    """
    sizes, parts = still_left(module)
    if parts:
        raise ConfigurationError(
            f"The weights of {type(module).__name__} were left as shards over {sizes} ranks.",
            "an earlier run under FSDP or DeepSpeed failed, or the parameters are above its gather_limit.",
            "fit it under the same strategy on as many ranks, or load weights (load_state_dict) before.",
        )


def still_left(module: nn.Module) -> tuple[tuple[int, ...], list[Part]]:
    """The mesh's sizes and this rank's parts; none where weights were loaded since."""
    sizes, parts = left.get(module, ((), []))
    parameters = dict(module.named_parameters())
    untouched = all(
        (known := parameters.get(part.name)) is not None
        and known._version == part.version
        and known.data_ptr() == part.address
        for part in parts
    )
    if parts and not untouched:  # weights were loaded since
        del left[module]
        return (), []
    return sizes, parts
