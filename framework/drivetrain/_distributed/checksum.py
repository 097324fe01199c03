"""A checksum of a tensor's bits, computed where the tensor is, or its parts are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from drivetrain._distributed.shards import ParameterShard, Region, Span

_CHUNK = 1 << 22  # elements at a time: bounds what the widening to int64 takes
_MIX = -7046029254386353131  # 2**64 divided by the golden ratio, as a signed number: spreads positions over all bits
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksum(tensor: Tensor, place: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the sum of the tensor's bit patterns, each times an odd number of its position's, modulo 2**64.

    Integer sums do not depend on the order of additions, so that the result is the same on every device; the factors
    make values that changed places show. One changed bit always changes the result, since an odd factor loses nothing.

    Args:
        tensor: of any shape, dtype and layout; one on the meta device counts as empty.
        place: gives, for positions in the tensor, those in another that it is a part of: the checksums of all parts add
            up to that of the whole.

    Returns:
        An int64 tensor of shape () on the tensor's device, not waited for.
    """
    if tensor.is_meta:
        return torch.zeros((), dtype=torch.int64)
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        if place is not None:
            of_pair = place
            place = lambda positions: of_pair(positions // 2) * 2 + positions % 2  # noqa: E731
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.resolve_neg().reshape(-1).view(_INTEGERS[tensor.dtype.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        positions = torch.arange(start, start + part.numel(), dtype=torch.int64, device=bits.device)
        if place is not None:
            positions = place(positions)
        total += (part * ((positions * _MIX) | 1)).sum()
    return total


def checksum_held(held: Tensor | ParameterShard, rank: int) -> Tensor:
    """Return what this rank adds to the checksum of a whole: over all ranks these add up to it.

    Args:
        held: a tensor that every rank holds whole, or what this rank holds of one.
        rank: this one; of what all hold rank 0 speaks.
    """
    if not isinstance(held, ParameterShard):
        return checksum(held) if rank == 0 else torch.zeros((), dtype=torch.int64)
    if not held.is_primary or held.local.numel() == 0:
        return torch.zeros((), dtype=torch.int64)
    return checksum(held.local, partial(_in_the_whole, region=held.region, shape=tuple(held.shape)))


def _in_the_whole(positions: Tensor, region: Region, shape: tuple[int, ...]) -> Tensor:
    """Return where elements of a part lie in the row-major order of the whole."""
    if isinstance(region, Span):
        return positions + region.start
    places, stride = torch.zeros_like(positions), 1
    for offset, size, length in reversed(list(zip(region.offsets, region.sizes, shape, strict=True))):
        places += (positions % size + offset) * stride
        positions, stride = positions // size, stride * length
    return places


def checksums(tensors: list[Tensor]) -> Tensor:
    """Return the checksums of several tensors, brought over together: int64 of shape (len(tensors),) on the CPU."""
    return brought_over([checksum(tensor) for tensor in tensors])


def brought_over(sums: list[Tensor]) -> Tensor:
    """Return tensors of shape () as one on the CPU, int64 of shape (len(sums),), with one copy for each device."""
    result = torch.zeros(len(sums), dtype=torch.int64)
    by_device: dict[torch.device, list[int]] = {}
    for index, value in enumerate(sums):
        by_device.setdefault(value.device, []).append(index)
    for indices in by_device.values():
        result[indices] = torch.stack([sums[index] for index in indices]).cpu()
    return result
