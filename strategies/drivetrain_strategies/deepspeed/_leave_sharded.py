"""Leaves a module sharded after a stage 3 run, and gathers the module in the next run.

In between, the module's weights are NaN and each rank keeps its shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from drivetrain.strategies import ParameterShard, Span
from drivetrain_strategies._missing_weights import LEFT_SHARDS, LeftShard, keep_left_shards, left_shards_for
from drivetrain_strategies.deepspeed._state import gather


@torch.no_grad()
def leave_parts(module: nn.Module, parts: Mapping[str, ParameterShard], limit: int, ranks: int, warn: bool) -> None:
    """Give parameters their shapes back, filled with NaN, and keep this rank's shards. Does not communicate.

    Args:
        module: the module, whose parameters are empty.
        parts: float32 shards by parameter name.
        limit: size in bytes up to which the parameters get storage, into which weights can be loaded.
        ranks: number of ranks over which the parameters are sharded.
        warn: log as a warning, not at debug level.
    """
    parameters = dict(module.named_parameters())
    nbytes = sum(math.prod(part.shape) * part.local.element_size() for part in parts.values())
    left_shards = []
    for name, part in parts.items():
        parameter = parameters[name]
        placeholder = torch.full((), math.nan, dtype=part.local.dtype, device=parameter.device).expand(part.shape)
        parameter.data = placeholder.clone() if nbytes <= limit else placeholder
        parameter.grad = None
        shape = parameter.shape
        left_shards.append(
            LeftShard(
                name,
                part.local.clone(),
                (part.region,),
                shape,
                parameter.stride(),
                parameter._version,
                parameter.data_ptr(),
            )
        )
    if left_shards:
        keep_left_shards(module, (ranks,), left_shards, "DeepSpeed", warn)


@torch.no_grad()
def gather_left_parts(module: nn.Module, ranks: int) -> None:
    """Gather the weights that an earlier run under DeepSpeed left as shards, if any. Collective.

    Raises:
        ConfigurationError: the weights were sharded over another number of ranks.
    """
    parts = left_shards_for(module, (ranks,))
    if not parts:
        return
    parameters = dict(module.named_parameters())
    for part in parts:
        (span,) = part.placements
        assert isinstance(span, Span)
        parameters[part.name].data = gather(part.local, part.shape, span)
    del LEFT_SHARDS[module]
