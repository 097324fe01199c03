"""Support for `DataLoader` subclasses with custom iteration.

Such loaders may yield more or fewer batches than their sampler requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from drivetrain._runtime.transfer import samples_in
from drivetrain.data._sharding import BatchShare
from drivetrain.errors import ConfigurationError

# Loaders of these packages yield one batch per request.
_TRUSTED_PACKAGES = ("torch", "torchdata")


def has_custom_iteration(loader: DataLoader[Any]) -> bool:
    """Return whether a `DataLoader` subclass overrides iteration, and may thus ignore its sampler's requests."""
    for name in ("__iter__", "_get_iterator"):
        owner = next(kind for kind in type(loader).__mro__ if name in vars(kind))
        if owner.__module__.partition(".")[0] not in _TRUSTED_PACKAGES:
            return True
    return False


def pair_with_shards(
    batches: Iterator[Any], shards: Iterator[BatchShare], rank_local: bool
) -> Iterator[tuple[Any, BatchShare]]:
    """Pair each batch with the sampler's shard if their sizes agree, and otherwise with a shard of the batch's size.

    The size of a batch is the first dimension of its first tensor. If this size differs from the sampler's request for
    the very first batch, the dimension does not count samples, and sizes are no longer compared.

    Args:
        batches: the loader's batches.
        shards: the shards that the sampler requested.
        rank_local: whether the shards of other ranks are unknown.
    """
    position, measurable = 0, None
    for batch in batches:
        shard, size = _next_or_none(shards), samples_in(batch)
        if measurable is None:
            measurable = shard is None or size == _requested(shard)
        if shard is None or (measurable and size is not None and size != _requested(shard)):
            samples = 1 if size is None else size
            shard = BatchShare(samples, samples, False, position)
        position = shard.start + shard.samples
        yield batch, shard._replace(total=None) if rank_local else shard


def _requested(shard: BatchShare) -> int:
    return max(shard.samples, 1)  # A joining rank requests one sample.


def _next_or_none(shards: Iterator[BatchShare]) -> BatchShare | None:
    try:
        return next(shards, None)
    except ConfigurationError:  # The loader yielded more batches than were requested.
        return None
