"""Modules whose weights are left as shards: after a failure, when the others cannot be asked for theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from drivetrain_strategies._missing_weights import Part, leave, left, left_by_deepspeed, parts_for, refuse_weights_left
from drivetrain_strategies.fsdp._original_parameters import Original


@torch.no_grad()
def gather_back(originals: Sequence[Original]) -> None:
    """Put the original parameters back, holding whole tensors, where they lived. Collective."""
    for original in originals:
        current: Any = original.current
        whole = current.full_tensor() if isinstance(current, DTensor) else current.data
        home = torch.device("cpu") if original.device.type == "meta" else original.device
        original.restore(whole.detach().to(home))


@torch.no_grad()
def leave_shards(module: nn.Module, originals: Sequence[Original], limit: int, tell: bool) -> None:
    """Put the original parameters back, filled with NaN, and keep this rank's shards for a later run. Talks to nobody.

    Args:
        module: whose.
        originals: its parameters.
        limit: bytes up to which the parameters get storage, into which weights can be loaded.
        tell: say so in the log.
    """
    parts: list[Part] = []
    sizes: tuple[int, ...] = ()
    sharded = [original for original in originals if isinstance(original.current, DTensor)]
    nbytes = sum(original.current.numel() * original.current.element_size() for original in sharded)
    for original in sharded:
        current: Any = original.current
        sizes = tuple(current.device_mesh.shape)
        nan = math.nan if current.dtype.is_floating_point or current.dtype.is_complex else 0
        hole = torch.full((), nan, dtype=current.dtype).expand(current.shape)
        local, placements, shape, stride = current.to_local(), current.placements, current.shape, current.stride()
        original.restore(hole.clone() if nbytes <= limit else hole)
        known = original.parameter
        parts.append(Part(original.name, local, placements, shape, stride, known._version, known.data_ptr()))
    if parts:
        leave(module, sizes, parts, "FSDP", tell)


@torch.no_grad()
def take_up_shards(module: nn.Module, mesh: Any) -> None:
    """Make a module whole whose weights an earlier run left as shards; nothing for any other. Collective.

    Raises:
        ConfigurationError: they were spread over another number of ranks.
    """
    if left_by_deepspeed(module):
        refuse_weights_left(module)
    parts = parts_for(module, tuple(mesh.shape))
    if not parts:
        return
    parameters = dict(module.named_parameters())
    for part in parts:
        local = part.local.to(mesh.device_type)
        spread = DTensor.from_local(local, mesh, part.placements, run_check=False, shape=part.shape, stride=part.stride)
        parameters[part.name].data = spread.full_tensor()
    del left[module]
