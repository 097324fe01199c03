"""Evaluating in company: ranks whose data ended keep those company that have more, where a forward is collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from drivetrain.data._batch_copies import copy_containers
from drivetrain.data._batch_source import NO_BATCH
from drivetrain.data._sharding import BatchShard
from drivetrain.errors import ConfigurationError
from drivetrain.strategies.strategy import Strategy

Pairs = Iterator[tuple[Any, BatchShard]]


def until_all_are_through(pairs: Pairs, strategy: Strategy) -> Pairs:
    """Go on, joining with the last batch, while any rank has data: one small exchange for each micro-batch."""
    control, last = strategy.control, NO_BATCH
    while True:
        pair = next(pairs, None)
        (having,) = control.all_reduce_async(torch.tensor([float(pair is not None)])).wait().tolist()
        if not having:
            return
        if pair is not None:
            last = copy_containers(pair[0])  # before the step takes it apart
            yield pair
        elif last is not NO_BATCH:
            yield copy_containers(last), BatchShard(0, None, True, start=-1)  # nothing of its own
        else:
            raise ConfigurationError(
                f"Rank {control.rank} got no batch at all from a loader of which other ranks have some.",
                "every rank takes part in each forward under this strategy, and without a batch it cannot.",
                "split the data so that every rank gets at least one batch.",
            )
