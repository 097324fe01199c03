"""`DataLoader`s that iterate in a way of their own, and may give more or fewer batches than their sampler asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from drivetrain._runtime.transfer import samples_in
from drivetrain.data._sharding import BatchShard
from drivetrain.errors import ConfigurationError

# Their loaders give a batch for each request.
_TRUSTED = ("torch", "torchdata")


def has_custom_iteration(loader: DataLoader[Any]) -> bool:
    """Tell whether a subclass says itself how it is iterated, so that only its batches tell how many there are."""
    for name in ("__iter__", "_get_iterator"):
        owner = next(kind for kind in type(loader).__mro__ if name in vars(kind))
        if owner.__module__.partition(".")[0] not in _TRUSTED:
            return True
    return False


def pair_with_shards(
    batches: Iterator[Any], shards: Iterator[BatchShard], alone: bool
) -> Iterator[tuple[Any, BatchShard]]:
    """Pair batches with the shares that the sampler dealt, as far as they fit; others are measured.

    What the first batch's first tensor holds tells whether measuring agrees with the sampler at all: it does not where
    that dimension is no number of samples.

    Args:
        batches: as they come.
        shares: what was asked for.
        alone: what other ranks get is not known.
    """
    position, measurable = 0, None
    for batch in batches:
        shard, size = _next(shards), samples_in(batch)
        if measurable is None:
            measurable = shard is None or size == _asked(shard)
        if shard is None or (measurable and size is not None and size != _asked(shard)):
            samples = 1 if size is None else size
            shard = BatchShard(samples, samples, False, position)
        position = shard.start + shard.samples
        yield batch, shard._replace(total=None) if alone else shard


def _asked(shard: BatchShard) -> int:
    return max(shard.samples, 1)  # who joins asks for one


def _next(shards: Iterator[BatchShard]) -> BatchShard | None:
    try:
        return next(shards, None)
    except ConfigurationError:  # more came than was asked for
        return None
