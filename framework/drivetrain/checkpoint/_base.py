"""Which weights a checkpoint that holds trained ones alone was trained on, told by checksums of their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from drivetrain._distributed.control import ControlPlane
from drivetrain._distributed.shards import Box, ParameterShard, Region
from drivetrain.errors import CheckpointError, listed

_CHUNK = 2**20  # elements at once: of each, some eight bytes are needed four times
_FACTORS = (
    -7046029254386353131,
    -4417276706812531889,
    1609587929392839161,
)  # odd numbers of 64 bits, without a pattern


def base_sums(values: Mapping[str, Any], control: ControlPlane) -> dict[str, str]:
    """Return a checksum of each tensor's values, the same however it is spread over the ranks. Collective.

    It is the sum, modulo 2**64, of a mix of each element's bits and its place. Values count as float32, wider ones as
    float64, so that a base in bfloat16 is the same one where it is held in float32.

    Args:
        values: by name: whole tensors, alike on every rank, or what this rank holds of them.
        control: the way to the other ranks.
    """
    mine = {}
    for name, value in values.items():
        if isinstance(value, ParameterShard):
            mine[name] = _sum_of(value.local, value.region, tuple(value.shape)) if value.speaks else 0
        else:
            mine[name] = _sum_of(value, None, tuple(value.shape)) if control.rank == 0 else 0
    told = control.gather_objects(mine)
    return {name: f"{sum(one[name] for one in told) % 2**64:016x}" for name in mine}


def check_base(path: str, saved: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Refuse a checkpoint of trained weights that were trained on others than these.

    Args:
        path: the checkpoint's.
        saved: the sums of its base.
        own: those of the same names here; names that are not here are left out.

    Raises:
        CheckpointError: names what is missing or has other values.
    """
    missing = [name for name in saved if name not in own]
    other = [name for name in saved if name in own and own[name] != saved[name]]
    if not missing and not other:
        return
    parts = {"has other values here": other, "is not here": missing}
    raise CheckpointError(
        f"{path!r} was trained on another base: "
        + "; ".join(f"{listed(names)} {what}" for what, names in parts.items() if names)
        + ".",
        "it holds what was trained (trainable_only=True), and of the rest checksums alone.",
        "build the module on the weights that it was trained on.",
    )


@torch.no_grad()
def _sum_of(local: torch.Tensor, region: Region | None, shape: tuple[int, ...]) -> int:
    local = local.detach()
    if hasattr(local, "full_tensor"):
        local = local.full_tensor()
    if isinstance(region, Box):
        return _sum_of_box(local, region, shape)
    return _sum_of_run(local.reshape(-1), 0 if region is None else region.start)


def _sum_of_box(local: torch.Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """The elements of a box are runs of the whole: as long as its rows where they are whole, else of its last size."""
    if local.numel() == 0:
        return 0
    whole = next((d for d in reversed(range(len(shape))) if box.sizes[d] != shape[d]), 0)
    runs = local.reshape(-1, *local.shape[whole:]).flatten(1) if len(shape) else local.reshape(1, 1)
    strides = [1] * len(shape)
    for dimension in reversed(range(len(shape) - 1)):
        strides[dimension] = strides[dimension + 1] * shape[dimension + 1]
    starts = torch.zeros(1, dtype=torch.int64)
    for dimension in range(whole):
        places = (torch.arange(box.sizes[dimension]) + box.offsets[dimension]) * strides[dimension]
        starts = (starts[:, None] + places[None]).reshape(-1)
    first = sum(box.offsets[dimension] * strides[dimension] for dimension in range(whole, len(shape)))
    return sum(_sum_of_run(run, int(start) + first) for run, start in zip(runs, starts, strict=True)) % 2**64


def _sum_of_run(values: torch.Tensor, start: int) -> int:
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for begin in range(0, values.numel(), _CHUNK):
        bits = _bits(values[begin : begin + _CHUNK])
        places = torch.arange(start + begin, start + begin + len(bits), device=bits.device)
        mixed = bits + places * _FACTORS[0]
        for factor in _FACTORS[1:]:
            mixed = (mixed ^ (mixed >> 29)) * factor
        total += (mixed ^ (mixed >> 32)).sum()
    return int(total) % 2**64


def _bits(values: torch.Tensor) -> torch.Tensor:
    if values.is_complex():
        parts = torch.view_as_real(values)
        return _bits(parts[..., 0]) * _FACTORS[2] + _bits(parts[..., 1])
    if not values.is_floating_point():
        return values.to(torch.int64)
    if values.dtype == torch.float64:
        return values.contiguous().view(torch.int64)
    return values.to(torch.float32).contiguous().view(torch.int32).to(torch.int64)
