"""Computes which rank gets which samples of an epoch, without communication and without reading data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple

import torch

from drivetrain._data.sample_order import Order

# Number of sample indices that are computed at a time: large enough to amortise torch's overhead, and small enough for
# an epoch to start without delay.
_BLOCK_SAMPLES = 4096


class BatchShare(NamedTuple):
    """One rank's part of a global micro-batch.

    Attributes:
        samples: the number of this rank's samples, which is the default weight of its batch; zero if ``joins`` is True.
        total: the number of samples of all ranks; None if the number cannot be known without communication.
        joins: whether there is no sample for this rank. In that case, the rank takes part in the step with the first
            sample of the global micro-batch.
        start: the position of the batch's first sample in the epoch's order.
    """

    samples: int
    total: int | None
    joins: bool
    start: int


class EpochOffset(NamedTuple):
    """The position in an epoch from which on the epoch is sharded.

    It differs from `EPOCH_START` if a run resumed within the epoch with another world size or batch size.

    Attributes:
        samples: the number of samples of the epoch's order that were already trained on.
        number: the number of the first micro-batch after these samples.
    """

    samples: int = 0
    number: int = 0


EPOCH_START = EpochOffset()


def compute_share(start: int, total: int, rank: int, world_size: int) -> BatchShare:
    """Return ``rank``'s slice of ``total`` samples from position ``start``.

    The sizes of the slices differ by at most one, and lower ranks have the larger slices.
    """
    size, larger = divmod(total, world_size)
    samples = size + (rank < larger)
    if samples == 0:
        return BatchShare(0, total, True, start)
    return BatchShare(samples, total, False, start + rank * size + min(rank, larger))


@dataclass(frozen=True, slots=True)
class EpochSharding:
    """How an epoch of known length is sharded over the data ranks.

    Global micro-batch k holds the positions ``k*W*b`` to ``(k+1)*W*b``, and rank r takes the r-th slice of b
    positions. A partial last micro-batch is split evenly. In evaluation, if the last micro-batch has fewer than W
    samples, its samples and those of the preceding micro-batch are split into two micro-batches of nearly equal size,
    so that every rank has data.

    Args:
        samples: the number of samples of the epoch, over all ranks.
        batch_size: b, the batch size per rank.
        rank: r, this process's data rank.
        world_size: W, the number of data ranks.
        drop_last: drop a partial global micro-batch.
        training: shard for training rather than for evaluation.
        offset: the position of the first sample in the epoch's order.
    """

    samples: int
    batch_size: int
    rank: int
    world_size: int
    drop_last: bool
    training: bool
    offset: int = 0

    def remaining(self, trained: int) -> EpochSharding:
        """Return the sharding of the samples after the first ``trained``, as a separate epoch."""
        return replace(self, samples=max(0, self.samples - trained), offset=self.offset + trained)

    @property
    def stride(self) -> int:
        """The number of samples in a whole global micro-batch."""
        return self.batch_size * self.world_size

    @property
    def whole_batches(self) -> int:
        """The number of whole global micro-batches that are not rebalanced with the tail."""
        return self.samples // self.stride - (len(self.tail) == 2)

    @property
    def tail(self) -> tuple[tuple[int, int], ...]:
        """The start and the size of each global micro-batch after the whole micro-batches: none, one or two."""
        whole_batches, remaining = divmod(self.samples, self.stride)
        if remaining == 0 or self.drop_last:
            return ()
        start = whole_batches * self.stride
        if self.training or not should_rebalance(self.stride, remaining, self.world_size) or whole_batches == 0:
            return ((start, remaining),)
        start -= self.stride
        first, second = split_in_half(self.stride + remaining)
        return ((start, first), (start + first, second))

    @property
    def length(self) -> int:
        """The number of micro-batches of the epoch, which is the same on every rank."""
        return self.whole_batches + len(self.tail)

    def shares(self, first: int = 0) -> Iterator[list[BatchShare]]:
        """Yield this rank's shares from micro-batch ``first`` on, in blocks."""
        whole_batches, tail, stride = self.whole_batches, self.tail, self.stride
        offset = self.offset + self.rank * self.batch_size
        while first < whole_batches:
            stop = min(whole_batches, first + self._block_size)
            starts = range(first * stride + offset, stop * stride + offset, stride)
            fields = zip(repeat(self.batch_size), repeat(stride), repeat(False), starts)
            # Calling `BatchShare(...)` would cost a Python call for each micro-batch.
            yield list(map(tuple.__new__, repeat(BatchShare), fields))
            first = stop
        yield [self._share(*tail_part) for tail_part in tail[first - whole_batches :]]

    def indices(self, order: Order, first: int = 0) -> Iterator[list[list[int]]]:
        """Yield the sample indices of this rank's micro-batches from ``first`` on, in blocks."""
        whole_batches, tail, stride = self.whole_batches, self.tail, self.stride
        columns = torch.arange(self.batch_size, dtype=torch.int64, device="cpu")
        columns += self.offset + self.rank * self.batch_size
        while first < whole_batches:
            stop = min(whole_batches, first + self._block_size)
            starts = torch.arange(first, stop, dtype=torch.int64, device="cpu") * stride
            yield order(starts[:, None] + columns).tolist()
            first = stop
        for tail_part in tail[first - whole_batches :]:
            share = self._share(*tail_part)
            stop = share.start + max(share.samples, 1)
            yield [order(torch.arange(share.start, stop, dtype=torch.int64, device="cpu")).tolist()]

    def _share(self, start: int, total: int) -> BatchShare:
        return compute_share(self.offset + start, total, self.rank, self.world_size)

    @property
    def _block_size(self) -> int:
        return max(1, _BLOCK_SAMPLES // self.batch_size)


def should_rebalance(before: int, remaining: int, world_size: int) -> bool:
    """Return whether to merge ``remaining`` tail samples with the ``before`` samples that precede them."""
    return remaining < world_size and before + remaining >= 2 * world_size


def split_in_half(samples: int) -> tuple[int, int]:
    """Return the sizes of two nearly equal parts, the larger size first."""
    return samples - samples // 2, samples // 2
