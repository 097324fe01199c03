"""Copies CUDA tensors to pinned memory, packed into few blocks because the allocator rounds each block up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ALIGNMENT = 64  # alignment in bytes, which is enough for any dtype


def pinned_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Start copying CUDA tensors to pinned memory, each on its device's current stream, and return the copies.

    torch rounds each pinned allocation up to a power of two, and each allocation takes about 0.1 ms. The copies
    therefore share a few blocks whose sizes are powers of two.
    """
    sizes = [-(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    copies: list[torch.Tensor] = [torch.empty(())] * len(tensors)
    for capacity, members in blocks(sizes):
        block = torch.empty(capacity, dtype=torch.uint8, pin_memory=True)
        for index, start in members:
            tensor = tensors[index].detach().contiguous()
            copy = block[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            copies[index] = copy.copy_(tensor, non_blocking=True)
    return copies


def blocks(sizes: Sequence[int]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Pack items of ``sizes`` bytes into blocks whose sizes are powers of two.

    The size of a block is the largest power of two that the remaining items fill, or the smallest that holds the
    largest item.

    Returns:
        For each block, the block's size and the index and offset of each item in the block.
    """
    remaining = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    packed = []
    while remaining:
        total = sum(sizes[index] for index in remaining)
        capacity = max(_power_below(total), _power_above(sizes[remaining[0]]))
        members, others, start = [], [], 0
        for index in remaining:
            if start + sizes[index] <= capacity:
                members.append((index, start))
                start += sizes[index]
            else:
                others.append(index)
        packed.append((capacity, members))
        remaining = others
    return packed


def _power_above(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _power_below(size: int) -> int:
    return 1 << max(size.bit_length() - 1, 0)
