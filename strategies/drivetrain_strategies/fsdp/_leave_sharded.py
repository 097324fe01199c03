"""Leaves weights as shards after a run (after a failure, or above ``gather_limit``) and gathers them later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from drivetrain_strategies._missing_weights import (
    LEFT_SHARDS,
    LeftShard,
    holds_deepspeed_shards,
    keep_left_shards,
    left_shards_for,
    refuse_missing_weights,
)
from drivetrain_strategies.fsdp._original_parameters import Original


@torch.no_grad()
def restore_whole_parameters(originals: Sequence[Original]) -> None:
    """Put the original parameters back on their original devices, with gathered values. Collective."""
    for original in originals:
        current: Any = original.current
        full_value = current.full_tensor() if isinstance(current, DTensor) else current.data
        device = torch.device("cpu") if original.device.type == "meta" else original.device
        original.restore(full_value.detach().to(device))


@torch.no_grad()
def leave_shards(module: nn.Module, originals: Sequence[Original], limit: int, warn: bool) -> None:
    """Put the original parameters back, filled with NaN, and keep this rank's shards. Does not communicate.

    Args:
        module: the module.
        originals: the module's original parameters.
        limit: size in bytes up to which the parameters get storage, into which weights can be loaded.
        warn: log as a warning, not at debug level.
    """
    parts: list[LeftShard] = []
    sizes: tuple[int, ...] = ()
    sharded = [original for original in originals if isinstance(original.current, DTensor)]
    nbytes = sum(original.current.numel() * original.current.element_size() for original in sharded)
    for original in sharded:
        current: Any = original.current
        sizes = tuple(current.device_mesh.shape)
        nan = math.nan if current.dtype.is_floating_point or current.dtype.is_complex else 0
        placeholder = torch.full((), nan, dtype=current.dtype).expand(current.shape)
        local, placements, shape, stride = current.to_local(), current.placements, current.shape, current.stride()
        original.restore(placeholder.clone() if nbytes <= limit else placeholder)
        restored = original.parameter
        parts.append(LeftShard(original.name, local, placements, shape, stride, restored._version, restored.data_ptr()))
    if parts:
        keep_left_shards(module, sizes, parts, "FSDP", warn)


@torch.no_grad()
def gather_left_shards(module: nn.Module, mesh: Any) -> None:
    """Gather the weights that an earlier run left as shards, if there are any. Collective.

    Raises:
        ConfigurationError: the weights were sharded over another number of ranks.
    """
    if holds_deepspeed_shards(module):
        refuse_missing_weights(module)
    parts = left_shards_for(module, tuple(mesh.shape))
    if not parts:
        return
    parameters = dict(module.named_parameters())
    for part in parts:
        local = part.local.to(mesh.device_type)
        sharded = DTensor.from_local(
            local, mesh, part.placements, run_check=False, shape=part.shape, stride=part.stride
        )
        parameters[part.name].data = sharded.full_tensor()
    del LEFT_SHARDS[module]
