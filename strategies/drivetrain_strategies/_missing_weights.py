"""Tracks modules whose weights a run left as shards on several ranks. This file imports only cheap modules."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from drivetrain.errors import ConfigurationError
from drivetrain.strategies import Span

logger = logging.getLogger("drivetrain")

GATHER_LIMIT = 8 * 2**30
"""Default of ``gather_limit``, the size in bytes up to which a module's parameters are gathered after a run."""


@dataclass(slots=True)
class LeftShard:
    """One rank's shard of a parameter, which a run left sharded.

    The version and the address show whether weights have been loaded into the parameter since then.

    Attributes:
        name: the parameter's name.
        local: the shard.
        placements: how the shards form the whole parameter.
        shape: shape of the whole parameter.
        stride: stride of the whole parameter.
        version: the parameter's version counter when the shard was left.
        address: the parameter's data pointer when the shard was left.
    """

    name: str
    local: torch.Tensor
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    version: int
    address: int


LEFT_SHARDS: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], list[LeftShard]]] = weakref.WeakKeyDictionary()
"""For each module that a run left sharded: the sizes of the mesh, and this rank's shards."""


def exceeds_limit(module: nn.Module, limit: int) -> bool:
    """Return whether the module's parameters take more than ``limit`` bytes."""
    # Lazy parameters have no shape before `configure_model`.
    parameters: list[Any] = [*module.parameters()]
    initialised = [parameter for parameter in parameters if not is_lazy(parameter)]
    return bool(sum(parameter.numel() * parameter.element_size() for parameter in initialised) > limit)


def check_gather_limit(nbytes: int, limit: int, strategy: str, warn: bool) -> bool:
    """Return whether parameters of ``nbytes`` are gathered after a run. If they stay sharded, log a message.

    Args:
        nbytes: size of all sharded parameters.
        limit: the strategy's ``gather_limit``.
        strategy: name of the strategy's class.
        warn: whether to log at level WARNING instead of DEBUG. A limit of 0 requests a sharded module and is never
            warned about.
    """
    if nbytes <= limit:
        return True
    logger.log(
        logging.WARNING if warn and limit else logging.DEBUG,
        "The parameters take %.1f GiB, which is more than gather_limit, so the module stays sharded. To get whole "
        "weights, raise %s(gather_limit=...), or call save_checkpoint within the run.",
        nbytes / 2**30,
        strategy,
    )
    return False


def keep_left_shards(
    module: nn.Module, sizes: tuple[int, ...], parts: list[LeftShard], strategy: str, warn: bool
) -> None:
    """Keep this rank's shards for a later run, and log that the weights are sharded. Does not communicate.

    Args:
        module: the module, whose parameters have lost their values.
        sizes: sizes of the mesh over which the parameters are sharded.
        parts: this rank's shards.
        strategy: name of the strategy that can continue from the shards.
        warn: whether to log at level WARNING instead of DEBUG.
    """
    LEFT_SHARDS[module] = sizes, parts
    logger.log(
        logging.WARNING if warn else logging.DEBUG,
        "The weights of %s are left as shards over %s ranks. Another run under %s on as many ranks continues from "
        "these shards. Before any other use of the module, load weights.",
        type(module).__name__,
        _format_sizes(sizes),
        strategy,
    )


def left_shards_for(module: nn.Module, sizes: tuple[int, ...]) -> list[LeftShard]:
    """Return this rank's shards for a run over a mesh of ``sizes``, or an empty list if the module holds its weights.

    Raises:
        ConfigurationError: the weights are sharded over another mesh.
    """
    left_sizes, parts = find_left_shards(module)
    if parts and left_sizes != sizes:
        raise ConfigurationError(
            f"The weights of {type(module).__name__} were left as shards over {_format_sizes(left_sizes)} ranks, but "
            f"this run has {_format_sizes(sizes)} ranks.",
            "an earlier run failed, or the parameters are above gather_limit, so each rank holds only its shard.",
            "use as many ranks and the same sharding again, or load weights (load_state_dict) before the run.",
        )
    return parts


def refuse_missing_weights(module: nn.Module) -> None:
    """Refuse a module whose weights are NaN because an earlier run left them as shards on several ranks.

    Raises:
        ConfigurationError: the weights are missing. The error says how to restore them.
    """
    sizes, parts = find_left_shards(module)
    if parts:
        raise ConfigurationError(
            f"The weights of {type(module).__name__} were left as shards over {_format_sizes(sizes)} ranks.",
            "an earlier run under FSDP or DeepSpeed failed, or the parameters are above gather_limit.",
            "run the same strategy on as many ranks, or load weights (load_state_dict) before the run.",
        )


def holds_deepspeed_shards(module: nn.Module) -> bool:
    """Return whether an earlier run under DeepSpeed left this module's weights as shards."""
    _, parts = find_left_shards(module)
    return bool(parts) and isinstance(parts[0].placements[0], Span)


def find_left_shards(module: nn.Module) -> tuple[tuple[int, ...], list[LeftShard]]:
    """Return the mesh's sizes and this rank's shards. Both are empty if weights have been loaded since the run."""
    sizes, parts = LEFT_SHARDS.get(module, ((), []))
    parameters = dict(module.named_parameters())
    untouched = all(
        (parameter := parameters.get(part.name)) is not None
        and parameter._version == part.version
        and parameter.data_ptr() == part.address
        for part in parts
    )
    if parts and not untouched:
        del LEFT_SHARDS[module]
        return (), []
    return sizes, parts


def _format_sizes(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))
