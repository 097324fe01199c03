"""Windows: the micro-batches of one optimizer step, read whole so that every loss is scaled before its backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from drivetrain._distributed.control_plane import ControlPlane, Pending
from drivetrain.data._batch_copies import copy_containers
from drivetrain.data._batch_source import NO_BATCH
from drivetrain.data._sharding import BatchShard
from drivetrain.errors import ConfigurationError

Weigh = Callable[[Any], int | float | torch.Tensor]


@dataclass(slots=True)
class MicroBatch:
    """One forward and backward of this rank.

    It is valid until the next one is asked for: whoever reads ahead makes a copy (`with_batch`).

    Attributes:
        batch: as the loader gave it.
        samples: of it on this rank.
        total: samples of all ranks in the global micro-batch.
        scale: what its loss is multiplied with, so that the strategy's mean over ranks of the window's summed
            gradients is the weighted mean over all of the window's items.
        weight: over how many items its loss is a mean.
        window_weight: the sum of the weights of the window's micro-batches on all ranks.
        ranks: how many ranks have data in this micro-batch.
        opens: it is the first of its window.
        closes: it is the last of its window: the optimizer steps after it.
    """

    batch: Any
    samples: int
    total: int
    scale: float
    weight: float
    window_weight: float
    ranks: int
    opens: bool
    closes: bool

    @property
    def joins(self) -> bool:
        """This rank has no sample of it and only keeps the others company."""
        return self.samples == 0

    def with_batch(self, batch: Any) -> MicroBatch:
        """A copy that holds another batch."""
        return MicroBatch(
            batch,
            self.samples,
            self.total,
            self.scale,
            self.weight,
            self.window_weight,
            self.ranks,
            self.opens,
            self.closes,
        )


Pairs = Iterator[tuple[Any, BatchShard]]


def single_windows(pairs: Pairs) -> Iterator[MicroBatch]:
    """Windows of one micro-batch in one process, whose module gives it no weight of its own: nothing depends on it."""
    micro = MicroBatch(None, 0, 0, 1.0, 0, 0, 1, True, True)  # filled anew each time: a new one would cost more
    for batch, shard in pairs:
        micro.batch = batch
        micro.samples = micro.total = micro.weight = micro.window_weight = shard.samples
        yield micro


def dealt_windows(
    pairs: Pairs, size: int, world_size: int, shards: Iterator[BatchShard] | None = None
) -> Iterator[MicroBatch]:
    """Windows whose weights are the samples that the sampler dealt: every rank knows them all without talking.

    Args:
        pairs: this rank's batches.
        size: micro-batches of a window.
        world_size: among how many ranks the data is dealt.
        shards: those of ``pairs``, known before: a batch is then read when its turn has come, as a loop by hand reads
            it. None reads a whole window to know them.
    """
    while True:
        if shards is None:
            taken = list(islice(pairs, size))
            window, coming = iter(taken), [shard for _, shard in taken]
        else:
            coming = list(islice(shards, size))
            window = islice(pairs, len(coming))
        if not coming:
            if shards is not None:
                next(pairs, None)  # which refuses what comes beyond what was dealt
            return
        total = sum(map(_known, coming))
        last = len(coming) - 1
        for position, (batch, shard) in enumerate(window):
            samples, everywhere = shard.samples, _known(shard)
            scale = world_size * samples / total if total else 0.0
            ranks = min(world_size, everywhere)
            yield MicroBatch(batch, samples, everywhere, scale, samples, total, ranks, position == 0, position == last)


def weighed_windows(pairs: Pairs, size: int, weigh: Weigh) -> Iterator[MicroBatch]:
    """Windows of one process whose module says what a micro-batch weighs."""
    number = 0
    while taken := list(islice(pairs, size)):
        weights = [checked_weight(weigh(batch), 0, number + position) for position, (batch, _) in enumerate(taken)]
        number += len(taken)
        total = sum(weights)
        last = len(taken) - 1
        for position, ((batch, shard), weight) in enumerate(zip(taken, weights, strict=True)):
            scale = weight / total if total else 0.0
            yield MicroBatch(
                batch, shard.samples, shard.samples, scale, weight, total, 1, position == 0, position == last
            )


def exchanged_windows(
    pairs: Pairs,
    size: int,
    control: ControlPlane,
    weigh: Weigh | None,
    limit: int | None,
    dealt_to: int | None = None,
    speaks: bool = True,
    last: Any = NO_BATCH,
    ahead: bool = True,
) -> Iterator[MicroBatch]:
    """Windows whose weights, or whose end, only each rank knows of its own: exchanged in one small all-reduce.

    The next window is read and its exchange under way while the current one computes. A rank that has run out of data
    goes on with its last batch, as a joiner, until all have.

    Args:
        pairs: this rank's batches, at most ``limit`` of them.
        size: micro-batches of a window.
        control: the way to the other ranks.
        weigh: the module's ``batch_weight``; None weighs a micro-batch by its samples.
        limit: micro-batches after which no rank goes on; None where only the data ends the epoch.
        dealt_to: among how many ranks the data is dealt; None for all.
        speaks: whether this rank counts; of several that read the same data, one does.
        last: the batch before the first of ``pairs``; `NO_BATCH` where there was none.
        ahead: read the next window before the current one is trained on.
    """
    world_size = dealt_to or control.world_size
    number = 0

    def read() -> tuple[list[tuple[Any, BatchShard, float]], Pending]:
        nonlocal last, number
        room = size if limit is None else max(0, min(size, limit - number))
        taken: list[tuple[Any, BatchShard, float]] = []
        for batch, shard in islice(pairs, room):
            last = batch
            weight = 0.0 if shard.joins else float(shard.samples)
            if weigh is not None and not shard.joins:
                weight = checked_weight(weigh(batch), control.rank, number + len(taken))
            taken.append((batch, shard, weight))
        if last is not NO_BATCH and (len(taken) < room or not ahead):
            # Before a step takes it apart: this rank may go on with it as a joiner. What is not read ahead shows only
            # later that it has come to its end.
            last = copy_containers(last)
        number += size
        report = torch.zeros(1 + 2 * size, dtype=torch.float64)
        report[0] = sum(weight for _, _, weight in taken)
        for position, (_, shard, _) in enumerate(taken):
            report[1 + position] = shard.samples
            report[1 + size + position] = not shard.joins
        if not speaks:
            report.zero_()
        return taken, control.all_reduce_async(report)

    taken, pending = read()
    while True:
        total, *counts = pending.wait().tolist()
        samples, ranks = counts[:size], counts[size:]
        reach = next((position for position in reversed(range(size)) if ranks[position]), -1) + 1
        if reach == 0:
            return
        if last is NO_BATCH:
            raise ConfigurationError(
                f"Rank {control.rank} got no batch at all from its training loader.",
                "an iterable data set is each rank's own part, and a rank without any cannot even join the others.",
                "split the stream so that every rank gets at least one batch.",
            )
        window = taken
        if ahead:
            taken, pending = read()
        for position in range(reach):
            batch, shard, weight = window[position] if position < len(window) else (copy_containers(last), None, 0.0)
            yield MicroBatch(
                batch,
                shard.samples if shard is not None else 0,
                int(samples[position]),
                world_size * weight / total if total else 0.0,
                weight,
                total,
                int(ranks[position]),
                position == 0,
                position == reach - 1,
            )
        if not ahead:
            taken, pending = read()


def checked_weight(weight: Any, rank: int, batch_idx: int) -> float:
    """Return a weight as a float.

    Raises:
        ConfigurationError: it is negative or not finite; names the rank and the batch index.
    """
    number = float(weight)
    if number < 0 or not math.isfinite(number):
        raise ConfigurationError(
            f"batch_weight returned {number} on rank {rank} for batch {batch_idx}.",
            "a weight is over how many items the loss is a mean: finite and not negative.",
            "return a count, such as the number of tokens that are not padding.",
        )
    return number


def _known(shard: BatchShard) -> int:
    assert shard.total is not None  # a static source knows
    return shard.total
