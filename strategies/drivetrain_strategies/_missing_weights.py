"""Which modules hold no weights because shards of them were left on several ranks. Imports nothing that takes long."""

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
"""Bytes of parameters up to which a module is whole again after a run, where the user says nothing."""


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


def exceeds(module: nn.Module, limit: int) -> bool:
    """Whether the module's parameters take more than ``limit`` bytes."""
    # Of lazy layers nobody knows yet, before `configure_model` may have given them a shape.
    every: list[Any] = [*module.parameters()]
    known = [parameter for parameter in every if not is_lazy(parameter)]
    return bool(sum(parameter.numel() * parameter.element_size() for parameter in known) > limit)


def are_gathered(nbytes: int, limit: int, strategy: str, tell: bool) -> bool:
    """Whether parameters of ``nbytes`` become whole after a run; says so where they do not.

    Args:
        nbytes: of all that are spread.
        limit: the strategy's ``gather_limit``.
        strategy: its class.
        tell: say so in the log.
    """
    if nbytes <= limit:
        return True
    logger.log(
        logging.WARNING if tell else logging.DEBUG,
        "The parameters take %.1f GiB, more than gather_limit: the module stays sharded. Raise %s(gather_limit=...), "
        "or save_checkpoint within the run, to have them whole.",
        nbytes / 2**30,
        strategy,
    )
    return False


def leave(module: nn.Module, sizes: tuple[int, ...], parts: list[Part], under: str, tell: bool) -> None:
    """Keep this rank's parts for a later run, and say so. Talks to nobody.

    Args:
        module: whose parameters hold nothing from now on.
        sizes: of the mesh over which they are spread.
        parts: this rank's.
        under: the strategy that goes on from them, as users call it.
        tell: say so in the log.
    """
    left[module] = sizes, parts
    logger.log(
        logging.WARNING if tell else logging.DEBUG,
        "The weights of %s are left as shards over %s ranks: another run under %s on as many goes on from them. "
        "For anything else, load weights first.",
        type(module).__name__,
        _in_words(sizes),
        under,
    )


def parts_for(module: nn.Module, sizes: tuple[int, ...]) -> list[Part]:
    """This rank's parts for a run over a mesh of ``sizes``; none where the module holds its weights.

    Raises:
        ConfigurationError: they are spread over another one.
    """
    found, parts = still_left(module)
    if parts and found != sizes:
        raise ConfigurationError(
            f"The weights of {type(module).__name__} were left as shards over {_in_words(found)} ranks, and there are "
            f"{_in_words(sizes)}.",
            "an earlier run failed, or the parameters are above gather_limit: each rank holds its part only.",
            "use as many ranks and the same sharding again, or load weights (load_state_dict) before.",
        )
    return parts


def refuse_weights_left(module: nn.Module) -> None:
    """Refuse a module whose weights are NaN, its shards being left on several ranks.

    Raises:
        ConfigurationError: says how to get them.
    """
    sizes, parts = still_left(module)
    if parts:
        raise ConfigurationError(
            f"The weights of {type(module).__name__} were left as shards over {_in_words(sizes)} ranks.",
            "an earlier run under FSDP or DeepSpeed failed, or the parameters are above its gather_limit.",
            "fit it under the same strategy on as many ranks, or load weights (load_state_dict) before.",
        )


def left_by_deepspeed(module: nn.Module) -> bool:
    """Whether an earlier run under DeepSpeed left this module as parts."""
    _, parts = still_left(module)
    return bool(parts) and isinstance(parts[0].placements[0], Span)


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


def _in_words(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))
