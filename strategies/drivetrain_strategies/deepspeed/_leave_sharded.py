"""How a module is left at stage 3 when it cannot be made whole: NaN, its parts kept for another run."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from drivetrain.strategies import ParameterShard, Span
from drivetrain_strategies._missing_weights import Part, leave, left, parts_for
from drivetrain_strategies.deepspeed._state import gather


@torch.no_grad()
def leave_parts(module: nn.Module, parts: Mapping[str, ParameterShard], limit: int, ranks: int, tell: bool) -> None:
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
        leave(module, (ranks,), kept, "DeepSpeed", tell)


@torch.no_grad()
def take_up_parts(module: nn.Module, ranks: int) -> None:
    """Make a module whole whose weights an earlier run under DeepSpeed left as parts. Collective.

    Raises:
        ConfigurationError: they were spread over another number of ranks.
    """
    parts = parts_for(module, (ranks,))
    if not parts:
        return
    parameters = dict(module.named_parameters())
    for part in parts:
        (span,) = part.placements
        assert isinstance(span, Span)
        parameters[part.name].data = gather(part.local, part.shape, span)
    del left[module]
