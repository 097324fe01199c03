"""The batches that a rank evaluates, predicts or passes over without training."""

from __future__ import annotations

from itertools import chain, islice

import torch

from drivetrain._data.batch_copies import copy_containers
from drivetrain._data.batch_source import NO_BATCH, BatchSource
from drivetrain._data.sharding import BatchShare
from drivetrain._loops.windows import Batches
from drivetrain.errors import ConfigurationError
from drivetrain.strategies.strategy import Strategy


def evaluation_batches(
    source: BatchSource, strategy: Strategy, name: str, limit: int | None, first: int = 0
) -> Batches:
    """Return a rank's batches from number ``first`` on.

    If forwards are collective and ranks may have different numbers of batches, a rank that has no batch left repeats
    its last one until all ranks have finished. It only joins in that batch, whose share has ``start == -1``.

    Args:
        source: yields this rank's batches.
        strategy: the strategy.
        name: the loader's name, for errors.
        limit: the number of micro-batches at which every rank stops; None for all.
        first: the number of the first micro-batch.
    """
    batches = source.epoch(0, first)
    if source.needs_order_check:
        batches = chain(_compared(batches, source, name, strategy), batches)
    if not source.shards_known and strategy.collective_forward and strategy.world_size > 1:
        batches = _until_all_ranks_finish(batches, strategy)
    return batches if limit is None else islice(batches, limit - first)


def _compared(batches: Batches, source: BatchSource, name: str, strategy: Strategy) -> Batches:
    """Yield the first batch, after the ranks have compared what they read."""
    from drivetrain._loops.data_order_checks import compare_order  # only some sources need it

    first_batch = next(batches, None)
    compare_order(source, name, strategy)
    if first_batch is not None:
        yield first_batch


def _until_all_ranks_finish(batches: Batches, strategy: Strategy) -> Batches:
    """Yield ``batches``, then repeat the last one while any rank has data. Each batch costs one small all-reduce."""
    control, last = strategy.control, NO_BATCH
    while True:
        batch_and_share = next(batches, None)
        (ranks,) = control.all_reduce_async(torch.tensor([float(batch_and_share is not None)])).wait().tolist()
        if not ranks:
            return
        if batch_and_share is not None:
            last = copy_containers(batch_and_share[0])  # a step may modify the original
            yield batch_and_share
        elif last is not NO_BATCH:
            yield copy_containers(last), BatchShare(0, None, True, start=-1)
        else:
            raise ConfigurationError(
                f"Rank {control.rank} got no batch from a loader that yields batches on other ranks.",
                "under this strategy every rank takes part in each forward, for which it needs a batch.",
                "split the data so that every rank gets at least one batch.",
            )
