"""Checksums of tensors, computed on the devices of the tensors.

The checksums of the shards of a tensor add up to the checksum of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from drivetrain._distributed.shards import ParameterShard, Region, Span

_CHUNK = 1 << 22  # the number of elements per chunk, which bounds the memory for the int64 copy
# 2**64 divided by the golden ratio, as a signed number. A multiplication by this factor spreads positions over all
# bits.
_MIX = -7046029254386353131
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype in which elements of a number of bytes are summed."""


@torch.no_grad()
def checksum(tensor: Tensor, map_positions: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the sum of the elements' bit patterns, each multiplied by an odd factor of its position, modulo 2**64.

    Integer sums do not depend on the order of additions, so the result is the same on every device. The factors make
    swapped elements visible. A single changed bit always changes the result, because multiplication by an odd factor is
    invertible.

    Args:
        tensor: a tensor of any shape, dtype and layout. A tensor on the meta device counts as empty.
        map_positions: for a shard, a function that maps positions in the shard to positions in the whole tensor. With
            this function, the checksums of all shards add up to the checksum of the whole tensor.

    Returns:
        An int64 tensor of shape () on the device of ``tensor``. The host does not wait for the result.
    """
    if tensor.is_meta:
        return torch.zeros((), dtype=torch.int64)
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        if map_positions is not None:
            map_pair = map_positions
            map_positions = lambda positions: map_pair(positions // 2) * 2 + positions % 2  # noqa: E731
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.resolve_neg().reshape(-1).view(INTEGERS[tensor.dtype.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        positions = torch.arange(start, start + part.numel(), dtype=torch.int64, device=bits.device)
        if map_positions is not None:
            positions = map_positions(positions)
        total += (part * ((positions * _MIX) | 1)).sum()
    return total


def checksum_share(value: Tensor | ParameterShard, rank: int) -> Tensor:
    """Return this rank's share of the checksum of a whole tensor. The shares of all ranks add up to the checksum.

    Args:
        value: a tensor that every rank holds whole, or the shard of a tensor on this rank.
        rank: this rank. Rank 0 contributes the tensors that every rank holds whole.
    """
    if not isinstance(value, ParameterShard):
        return checksum(value) if rank == 0 else torch.zeros((), dtype=torch.int64)
    if not value.is_primary or value.local.numel() == 0:
        return torch.zeros((), dtype=torch.int64)
    return checksum(value.local, partial(_positions_in_whole, region=value.region, shape=tuple(value.shape)))


def _positions_in_whole(positions: Tensor, region: Region, shape: tuple[int, ...]) -> Tensor:
    """Return the positions of a shard's elements in the row-major order of the whole tensor."""
    if isinstance(region, Span):
        return positions + region.start
    result, stride = torch.zeros_like(positions), 1
    for offset, size, length in reversed(list(zip(region.offsets, region.sizes, shape, strict=True))):
        result += (positions % size + offset) * stride
        positions, stride = positions // size, stride * length
    return result


def checksums(tensors: list[Tensor]) -> Tensor:
    """Return the checksums of several tensors, int64 of shape (len(tensors),) on the CPU, with one copy to the host."""
    return stack_on_cpu([checksum(tensor) for tensor in tensors])


def stack_on_cpu(sums: list[Tensor]) -> Tensor:
    """Stack tensors of shape () into an int64 tensor of shape (len(sums),) on the CPU, with one copy to the host."""
    if not sums:
        return torch.zeros(0, dtype=torch.int64)
    return torch.stack([value.to(sums[0].device) for value in sums]).cpu()
