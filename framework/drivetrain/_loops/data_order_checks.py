"""Ranks that read what they should not: different orders of one data set, or all of them the same part of a stream."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from drivetrain._distributed.control_plane import spread
from drivetrain.data._batch_source import BatchSource
from drivetrain.data._order_fingerprint import OrderFingerprint
from drivetrain.data._sharding import BatchShard
from drivetrain.errors import ConfigurationError
from drivetrain.strategies.strategy import Strategy

logger = logging.getLogger("drivetrain")

Pairs = Iterator[tuple[Any, BatchShard]]


def compared(pairs: Pairs, source: BatchSource, name: str, strategy: Strategy) -> Pairs:
    """Return ``pairs``; as the first of them comes, ranks compare what they have read.

    One small exchange in a run for each source whose order is not the engine's own. It comes before the batch is used.

    Args:
        pairs: this rank's batches of an epoch.
        source: where they come from, while its ``needs_order_check`` holds.
        name: what the loader is called.
        strategy: the ranks.

    Raises:
        ConfigurationError: on every rank, as the first batch is read: they go through different orders.
    """
    return chain(_first(pairs, source, name, strategy), pairs)


def _first(pairs: Pairs, source: BatchSource, name: str, strategy: Strategy) -> Pairs:
    pair = next(pairs, None)
    by_rank = strategy.control.gather_objects(
        (strategy.data_rank, [tuple(sight) for sight in source.order_fingerprints()])
    )
    data_ranks = [data_rank for data_rank, _ in by_rank]
    for told in zip(*(seen for _, seen in by_rank), strict=True):
        sights = [OrderFingerprint(*sight) for sight in told]
        if sights[0].common:
            _check_order(sights, name)
        elif strategy.rank == 0:
            _tell_of_equal_batches(sights, data_ranks, name)
    if pair is not None:
        yield pair


def _check_order(sights: Sequence[OrderFingerprint], name: str) -> None:
    by_digest = spread([sight.digest for sight in sights])
    if None in by_digest or len(by_digest) == 1:
        return
    sampler = sights[0].name
    ranks = " and ".join(f"rank(s) {ranks}" for ranks in by_digest.values())
    raise ConfigurationError(
        f"{sampler}, the sampler of the {name}, draws different orders on {ranks}.",
        "each rank goes through the whole order and takes its part of it: of different orders some samples would be "
        "read twice, and others not at all.",
        f"let {sampler} draw from the global generator of torch, Python or NumPy, which is alike on all ranks while it "
        "draws, or from one that is seeded alike; use_distributed_sampler=False leaves each rank its own order.",
    )


def _tell_of_equal_batches(sights: Sequence[OrderFingerprint], data_ranks: Sequence[int], name: str) -> None:
    ranks = len(set(data_ranks))
    if ranks == 1 or sights[0].digest is None or len({sight.digest for sight in sights}) > 1:
        return
    logger.warning(
        "The first batch of the %s is the same on all ranks. %s seems to be read whole by each of them, so that every "
        "sample counts %d times: give each rank a part of its own, such as drivetrain.data.split_by_rank(%s(...)). "
        "Said once.",
        name,
        sights[0].name,
        ranks,
        sights[0].name,
    )
