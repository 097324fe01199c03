"""Evaluation with different numbers of batches on each rank, under a strategy whose forward is collective."""

from __future__ import annotations

import torch

from drivetrain._loops.windows import Batches
from drivetrain.data._batch_copies import copy_containers
from drivetrain.data._batch_source import NO_BATCH
from drivetrain.data._sharding import BatchShare
from drivetrain.errors import ConfigurationError
from drivetrain.strategies.strategy import Strategy


def until_all_ranks_finish(batches: Batches, strategy: Strategy) -> Batches:
    """Yield ``batches``, then repeat the last one, which this rank only joins, while any rank has data.

    Each batch costs one small all-reduce.
    """
    control, last = strategy.control, NO_BATCH
    while True:
        batch_and_shard = next(batches, None)
        (ranks,) = control.all_reduce_async(torch.tensor([float(batch_and_shard is not None)])).wait().tolist()
        if not ranks:
            return
        if batch_and_shard is not None:
            last = copy_containers(batch_and_shard[0])  # a step may modify the original
            yield batch_and_shard
        elif last is not NO_BATCH:
            yield copy_containers(last), BatchShare(0, None, True, start=-1)  # -1 marks a repeated batch
        else:
            raise ConfigurationError(
                f"Rank {control.rank} got no batch from a loader that yields batches on other ranks.",
                "under this strategy every rank takes part in each forward, for which it needs a batch.",
                "split the data so that every rank gets at least one batch.",
            )
