"""How a module is left at stage 3 when it cannot be made whole: NaN, its parts kept for another run."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.errors import ConfigurationError
from drivetrain.shards import Shard, Span
from drivetrain_strategies.weights_left import Part, left, still_left

logger = logging.getLogger("drivetrain")


@torch.no_grad()
def leave_parts(module: nn.Module, parts: Mapping[str, Shard], limit: int, ranks: int, tell: bool) -> None:
    """Give parameters back their shapes, filled with NaN, and keep this rank's parts. Talks to nobody.

    Args:
        module: whose parameters hold nothing.
        parts: by parameter name, in float32.
        limit: bytes up to which the parameters get storage, into which weights can be loaded.
        ranks: over how many the parts are spread.
        tell: say so in the log.
    """
    parameters = dict(module.named_parameters())
    nbytes = sum(math.prod(part.shape) * part.local.element_size() for part in parts.values())
    kept = []
    for name, part in parts.items():
        known = parameters[name]
        hole = torch.full((), math.nan, dtype=part.local.dtype, device=known.device).expand(part.shape)
        known.data = hole.clone() if nbytes <= limit else hole
        known.grad = None
        shape = known.shape
        kept.append(
            Part(name, part.local.clone(), (part.region,), shape, known.stride(), known._version, known.data_ptr())
        )
    if kept:
        left[module] = (ranks,), kept
        logger.log(
            logging.WARNING if tell else logging.DEBUG,
            "The weights of %s are left as parts over %d ranks: another run under DeepSpeed on as many goes on from "
            "them. For anything else, load weights first.",
            type(module).__name__,
            ranks,
        )


@torch.no_grad()
def take_up_parts(module: nn.Module, ranks: int) -> None:
    """Make a module whole whose weights an earlier run under DeepSpeed left as parts. Collective.

    Raises:
        ConfigurationError: they were spread over another number of ranks.
    """
    sizes, parts = still_left(module)
    if not parts:
        return
    if sizes != (ranks,):
        raise ConfigurationError(
            f"The weights of {type(module).__name__} were left as parts over {sizes[0]} ranks, and there are {ranks}.",
            "an earlier run failed, or the parameters are above gather_limit: each rank holds its part only.",
            "use as many ranks again, or load weights (load_state_dict) before.",
        )
    parameters = dict(module.named_parameters())
    for part in parts:
        (span,) = part.placements
        assert isinstance(span, Span)
        whole = part.local.new_zeros(part.shape)
        whole.view(-1)[span.start : span.stop].copy_(part.local)
        dist.all_reduce(whole)
        parameters[part.name].data = whole
    del left[module]


def left_by_deepspeed(module: nn.Module) -> bool:
    """Whether an earlier run under DeepSpeed left this module as parts."""
    _, parts = still_left(module)
    return bool(parts) and isinstance(parts[0].placements[0], Span)
