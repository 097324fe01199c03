"""Checks that ranks read the right data: the same order of a data set, and different parts of a stream."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain

from drivetrain._distributed.control_plane import spread
from drivetrain._loops.windows import Batches
from drivetrain.data._batch_source import BatchSource
from drivetrain.data._order_fingerprint import OrderFingerprint
from drivetrain.errors import ConfigurationError
from drivetrain.strategies.strategy import Strategy

logger = logging.getLogger("drivetrain")


def compare_ranks(batches: Batches, source: BatchSource, name: str, strategy: Strategy) -> Batches:
    """Return ``batches``, and compare between ranks what was read, before the first batch is used.

    Costs one small exchange a run, for each source whose order is not determined by the engine.

    Args:
        batches: this rank's batches of an epoch.
        source: their source, while its ``needs_order_check`` is true.
        name: the loader's name.
        strategy: the strategy.

    Raises:
        ConfigurationError: the ranks read different orders. Raised on every rank as the first batch is read.
    """
    return chain(_compare_first(batches, source, name, strategy), batches)


def _compare_first(batches: Batches, source: BatchSource, name: str, strategy: Strategy) -> Batches:
    pair = next(batches, None)
    by_rank = strategy.control.gather_objects(
        (strategy.data_rank, [tuple(sight) for sight in source.order_fingerprints()])
    )
    data_ranks = [data_rank for data_rank, _ in by_rank]
    for of_ranks in zip(*(seen for _, seen in by_rank), strict=True):
        sights = [OrderFingerprint(*sight) for sight in of_ranks]
        if sights[0].common:
            _check_order(sights, name)
        elif strategy.rank == 0:
            _warn_of_equal_batches(sights, data_ranks, name)
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
        "each rank iterates over the whole order and takes its part of it: with different orders some samples would be "
        "read twice and others not at all.",
        f"let {sampler} draw from the global generator of torch, Python or NumPy, which is the same on all ranks while "
        "it draws, or from one that has the same seed on all of them; use_distributed_sampler=False leaves each rank "
        "its own order.",
    )


def _warn_of_equal_batches(sights: Sequence[OrderFingerprint], data_ranks: Sequence[int], name: str) -> None:
    ranks = len(set(data_ranks))
    if ranks == 1 or sights[0].digest is None or len({sight.digest for sight in sights}) > 1:
        return
    logger.warning(
        "The first batch of the %s is the same on all ranks. Each rank seems to read the whole of %s, so that every "
        "sample counts %d times: give each rank its own part, for example by drivetrain.data.split_by_rank(%s(...)). "
        "Said once.",
        name,
        sights[0].name,
        ranks,
        sights[0].name,
    )
