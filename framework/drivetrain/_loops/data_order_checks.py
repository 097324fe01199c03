"""Checks that ranks read the right data: the same order of a data set, and different parts of a stream."""

from __future__ import annotations

import logging

from drivetrain._data.batch_source import BatchSource
from drivetrain._data.order_fingerprint import OrderFingerprint
from drivetrain._distributed.control_plane import refuse_differences
from drivetrain.errors import ConfigurationError
from drivetrain.strategies.strategy import Strategy

logger = logging.getLogger("drivetrain")

_WHY_ONE_ORDER = (
    "each rank iterates over the whole order and takes its part, so with different orders some samples would be read "
    "twice and others not at all."
)
_FIX_ORDER = (
    "let the sampler draw from the global generator of torch, Python or NumPy, which is the same on all ranks while "
    "the sampler draws, or from a generator that has the same seed on all ranks; or set "
    "use_distributed_sampler=False, with which each rank keeps its own order."
)


def compare_order(source: BatchSource, name: str, strategy: Strategy) -> None:
    """Compare the data that the ranks have read first. Called after the first batch was read, before it is used.

    The comparison costs one small exchange per run for each source whose order the engine does not determine.

    Args:
        source: the source of the batches, whose ``needs_order_check`` is true.
        name: the loader's name.
        strategy: the strategy, whose control plane connects the ranks.

    Raises:
        ConfigurationError: the ranks read different orders. Raised on every rank.
    """
    by_rank = strategy.control.gather_objects(
        (strategy.data_rank, [tuple(fingerprint) for fingerprint in source.order_fingerprints()])
    )
    data_ranks = [data_rank for data_rank, _ in by_rank]
    for fields_by_rank in zip(*(rank_fields for _, rank_fields in by_rank), strict=True):
        fingerprints = [OrderFingerprint(*fields) for fields in fields_by_rank]
        digests = [fingerprint.digest for fingerprint in fingerprints]
        if None in digests:
            continue
        if fingerprints[0].common:
            refuse_differences(
                [{f"the order of {fingerprints[0].name}, the sampler of the {name}": digest} for digest in digests],
                _WHY_ONE_ORDER,
                _FIX_ORDER,
                ConfigurationError,
            )
        elif strategy.rank == 0 and len(set(data_ranks)) > 1 and len(set(digests)) == 1:
            _warn_of_equal_batches(fingerprints[0].name, len(set(data_ranks)), name)


def _warn_of_equal_batches(data: str, ranks: int, name: str) -> None:
    logger.warning(
        "The first batch of the %s is the same on all ranks. Each rank seems to read the whole of %s, so that every "
        "sample counts %d times: give each rank its own part, for example by drivetrain.data.split_by_rank(%s(...)). "
        "This warning is not repeated.",
        name,
        data,
        ranks,
        data,
    )
