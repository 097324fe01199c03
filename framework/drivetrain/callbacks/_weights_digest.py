"""A digest of a module's weights, the same under every strategy and on any number of ranks."""

from __future__ import annotations

import hashlib
from functools import partial

import torch
from torch import Tensor

from drivetrain._distributed.shards import ParameterShard, Region, Span
from drivetrain.callbacks._checksum import brought_over, checksum
from drivetrain.strategies.strategy import Strategy


def weights_digest(strategy: Strategy) -> str:
    """Return a digest of all parameters and persistent buffers, to the bit. Collective.

    Each rank adds up what it holds, at its place in the whole; nothing is gathered but a number for each tensor.

    Args:
        strategy: holds the module.
    """
    said, sums = [], []
    for name, value in sorted(strategy.model_state().items()):
        held = strategy.shard_of(value)
        said.append(f"{name} {tuple(held.shape)} {held.dtype}")
        sums.append(_own(held, strategy.rank))
    total = strategy.control.all_gather(brought_over(sums)).sum(0).tolist()
    return hashlib.blake2b(repr((said, total)).encode(), digest_size=16).hexdigest()


def _own(held: Tensor | ParameterShard, rank: int) -> Tensor:
    """What this rank adds to a tensor's sum: nothing where another speaks for it."""
    if not isinstance(held, ParameterShard):
        return checksum(held) if rank == 0 else torch.zeros((), dtype=torch.int64)
    if not held.speaks or held.local.numel() == 0:
        return torch.zeros((), dtype=torch.int64)
    return checksum(held.local, partial(_in_the_whole, region=held.region, shape=held.shape))


def _in_the_whole(positions: Tensor, region: Region, shape: tuple[int, ...]) -> Tensor:
    """Return where elements of a part lie in the row-major order of the whole."""
    if isinstance(region, Span):
        return positions + region.start
    places, stride = torch.zeros_like(positions), 1
    for offset, size, length in reversed(list(zip(region.offsets, region.sizes, shape, strict=True))):
        places += (positions % size + offset) * stride
        positions, stride = positions // size, stride * length
    return places
