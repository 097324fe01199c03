"""Groups micro-batches into windows, and computes the factors of their losses.

A window is the micro-batches of one optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from drivetrain._data.batch_copies import copy_containers
from drivetrain._data.batch_source import NO_BATCH
from drivetrain._data.sharding import BatchShare
from drivetrain.errors import ConfigurationError
from drivetrain.strategies.strategy import Strategy

BatchWeight = Callable[[Any], int | float | torch.Tensor]
"""The module's ``batch_weight``: returns the number of items that the loss of a batch is a mean of."""

Batches = Iterator[tuple[Any, BatchShare]]
"""This rank's batches, each with its share of the global micro-batch."""


@dataclass(slots=True)
class MicroBatch:
    """The batch of one forward and backward on this rank, and its share of the window.

    A micro-batch is valid until the next one is requested. Code that reads ahead makes a copy by `with_batch`.

    Attributes:
        batch: the batch as the loader yielded it, until `BatchMover` replaces it by the batch on the device.
        samples: the number of samples in this rank's batch.
        total: the number of samples of all ranks in the global micro-batch.
        scale: the factor of the batch's loss. With this factor, the strategy's mean over ranks of the summed gradients
            is the weighted mean over all items of the window.
        weight: the number of items that the batch's loss is a mean of.
        window_weight: the sum of the weights of the window's micro-batches on all ranks.
        ranks: the number of ranks that have data in this micro-batch.
        opens: whether this is the first micro-batch of the window.
        closes: whether this is the last micro-batch of the window, after which the optimizers step.
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
        """Whether this rank has no samples and runs the micro-batch only to match the collectives of other ranks."""
        return self.samples == 0

    def with_batch(self, batch: Any) -> MicroBatch:
        """Return a copy with another batch."""
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


def single_windows(batches: Batches) -> Iterator[MicroBatch]:
    """Yield windows of one micro-batch, whose loss is not scaled, for a single process without ``batch_weight``."""
    micro_batch = MicroBatch(None, 0, 0, 1.0, 0, 0, 1, True, True)  # reused, since creating one costs more
    for batch, share in batches:
        micro_batch.batch = batch
        micro_batch.samples = micro_batch.total = micro_batch.weight = micro_batch.window_weight = share.samples
        yield micro_batch


def precomputed_windows(
    batches: Batches, size: int, world_size: int, weigh: BatchWeight | None, shares: Iterator[BatchShare] | None
) -> Iterator[MicroBatch]:
    """Yield windows whose weights every rank knows without communication.

    Args:
        batches: this rank's batches.
        size: the number of micro-batches of a window.
        world_size: the number of ranks that the data is split over; 1 with ``weigh``.
        weigh: the module's ``batch_weight``; None to weight by samples.
        shares: the shares of ``batches``, if the shares are known in advance, so that each batch is read only when it
            is trained on. With None, all batches of a window are read before the first is trained on.
    """
    number = 0
    while True:
        if shares is None:
            read = list(islice(batches, size))
            window, window_shares = iter(read), [share for _, share in read]
        else:
            window_shares = list(islice(shares, size))
            window = islice(batches, len(window_shares))
        if not window_shares:
            return
        weights: list[float] | None = None
        total: float = sum(map(_total_samples, window_shares))
        if weigh is not None:
            weights = [validate_weight(weigh(batch), 0, number + position) for position, (batch, _) in enumerate(read)]
            total = sum(weights)
        number += len(window_shares)
        last = len(window_shares) - 1
        for position, (batch, share) in enumerate(window):
            weight, all_samples = share.samples if weights is None else weights[position], _total_samples(share)
            scale = world_size * weight / total if total else 0.0
            ranks = min(world_size, all_samples)
            yield MicroBatch(
                batch, share.samples, all_samples, scale, weight, total, ranks, position == 0, position == last
            )


def allreduced_windows(
    batches: Batches,
    size: int,
    strategy: Strategy,
    weigh: BatchWeight | None,
    limit: int | None,
    joining_batch: Callable[[], Any] | None,
    read_ahead: bool,
    on_end: Callable[[], None],
) -> Iterator[MicroBatch]:
    """Yield windows for data whose weights or length each rank knows only for its own part.

    Each window costs one small all-reduce.

    With ``read_ahead``, the next window is read, and its all-reduce started, while the current one is trained on. A
    rank without data left joins with its last batch until all ranks have finished.

    Args:
        batches: this rank's batches, at most ``limit`` of them.
        size: the number of micro-batches of a window.
        strategy: the strategy, whose control plane connects the ranks. Of ranks that read the same data, only the data
            leader's batches count.
        weigh: the module's ``batch_weight``; None to weight by samples.
        limit: micro-batches after which every rank stops; None to stop when the data of all ranks has ended.
        joining_batch: returns the batch with which this rank joins if it has read none; `NO_BATCH` if there is none.
        read_ahead: whether the next window is read before the current one is trained on.
        on_end: called before the last window, if that is shorter than the others: the data of all ranks has ended then.
    """
    control, world_size = strategy.control, strategy.data_world_size
    number, last = 0, NO_BATCH

    def read() -> tuple[list[tuple[Any, BatchShare, float]], Callable[[], torch.Tensor]]:
        nonlocal last, number
        capacity = size if limit is None else max(0, min(size, limit - number))
        window: list[tuple[Any, BatchShare, float]] = []
        for batch, share in islice(batches, capacity):
            last = batch
            weight = 0.0 if share.joins else float(share.samples)
            if weigh is not None and not share.joins:
                weight = validate_weight(weigh(batch), control.rank, number + len(window))
            window.append((batch, share, weight))
        if last is not NO_BATCH and (len(window) < capacity or not read_ahead):
            # The batch is copied before a step modifies it, since this rank may have to join with the batch. Without
            # read-ahead it is not known yet whether the data has ended.
            last = copy_containers(last)
        number += size
        report = torch.zeros(1 + 2 * size, dtype=torch.float64)
        if strategy.is_data_leader:
            report[0] = sum(weight for _, _, weight in window)
            for position, (_, share, _) in enumerate(window):
                report[1 + position] = share.samples
                report[1 + size + position] = not share.joins
        return window, control.all_reduce_async(report)

    next_window, pending = read()
    while True:
        total, *reported = pending().tolist()
        samples, ranks = reported[:size], reported[size:]
        length = next((position for position in reversed(range(size)) if ranks[position]), -1) + 1
        if length < size:
            on_end()
        if length == 0:
            return
        if last is NO_BATCH and joining_batch is not None:
            last = joining_batch()
        if last is NO_BATCH:
            raise ConfigurationError(
                f"Rank {control.rank} got no batch from its training loader.",
                "each rank reads its own part of an iterable data set, and a rank without any batch cannot join the "
                "others.",
                "split the stream so that every rank gets at least one batch.",
            )
        window = next_window
        if read_ahead:
            next_window, pending = read()
        for position in range(length):
            batch, share, weight = window[position] if position < len(window) else (copy_containers(last), None, 0.0)
            yield MicroBatch(
                batch,
                share.samples if share is not None else 0,
                int(samples[position]),
                world_size * weight / total if total else 0.0,
                weight,
                total,
                int(ranks[position]),
                position == 0,
                position == length - 1,
            )
        if not read_ahead:
            next_window, pending = read()


def validate_weight(weight: Any, rank: int, batch_idx: int) -> float:
    """Return ``weight`` as a float.

    Raises:
        ConfigurationError: the weight is negative or not finite. The error names the rank and the batch index.
    """
    number = float(weight)
    if number < 0 or not math.isfinite(number):
        raise ConfigurationError(
            f"batch_weight returned {number} on rank {rank} for batch {batch_idx}.",
            "a weight is the number of items that the loss is a mean of, so it is finite and not negative.",
            "return a count, such as the number of tokens that are not padding.",
        )
    return number


def _total_samples(share: BatchShare) -> int:
    assert share.total is not None  # the sources of `precomputed_windows` know the total without communication
    return share.total
