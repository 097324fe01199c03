"""A digest of a module's weights, the same under every strategy and on any number of ranks."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from drivetrain._distributed.shards import ParameterShard, Span
from drivetrain.callbacks._checksum import checksum
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
        sums.append(_own(held, strategy.rank).cpu())
    mine = torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)
    total = strategy.control.all_gather(mine).sum(0).tolist()
    return hashlib.blake2b(repr((said, total)).encode(), digest_size=16).hexdigest()


def _own(held: Tensor | ParameterShard, rank: int) -> Tensor:
    """What this rank adds to a tensor's sum: nothing where another speaks for it."""
    if not isinstance(held, ParameterShard):
        return checksum(held) if rank == 0 else torch.zeros((), dtype=torch.int64)
    region = held.region
    if not held.speaks or held.local.numel() == 0:
        return torch.zeros((), dtype=torch.int64)
    if isinstance(region, Span):
        return checksum(held.local, torch.arange(region.start, region.stop, dtype=torch.int64))
    # The place of each element in the row-major order of the whole.
    places = torch.zeros((), dtype=torch.int64)
    for offset, size, length in zip(region.offsets, region.sizes, held.shape, strict=True):
        places = places[..., None] * length + torch.arange(offset, offset + size, dtype=torch.int64)
    return checksum(held.local, places.reshape(-1))
