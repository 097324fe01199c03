"""Dealing: which rank takes which samples of an epoch. Pure arithmetic; nothing here talks or reads data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple

import torch

from drivetrain.data.order import Order

# How many sample indices are worked out at once: enough that torch's overhead is lost in it, and few enough that an
# epoch starts at once.
_BLOCK_SAMPLES = 4096


class BatchShard(NamedTuple):
    """What of a global micro-batch this rank holds.

    Attributes:
        samples: how many samples of it are this rank's; zero where it joins. The rank's weight by default.
        total: the samples of all ranks together; None where they are not known without talking.
        joins: there was no sample for this rank, and its batch is the first sample of the global micro-batch.
        start: position in the epoch's order of the batch's first sample.
    """

    samples: int
    total: int | None
    joins: bool
    start: int


class ShardingOrigin(NamedTuple):
    """Where the dealing of an epoch begins: elsewhere than at 0 after a resume under another dealing.

    Attributes:
        samples: of the epoch's order that were trained on before.
        number: of the first micro-batch that is dealt.
    """

    samples: int = 0
    number: int = 0


EPOCH_START = ShardingOrigin()


def share_of(start: int, total: int, rank: int, world_size: int) -> BatchShard:
    """Deal ``total`` samples from position ``start`` in slices whose sizes differ by at most one, lower ranks first."""
    size, larger = divmod(total, world_size)
    samples = size + (rank < larger)
    if samples == 0:
        return BatchShard(0, total, True, start)
    return BatchShard(samples, total, False, start + rank * size + min(rank, larger))


@dataclass(frozen=True, slots=True)
class Deal:
    """How an epoch of known length is dealt.

    Global micro-batch k holds the positions ``k*W*b`` up to ``(k+1)*W*b`` and rank r takes the r-th slice of b. The
    last, partial one is dealt evenly. In evaluation a partial one of fewer than W samples is dealt together with
    the one before it, as two nearly equal ones, so that no rank is without data.

    Args:
        samples: the length of the epoch, of all ranks together.
        batch_size: b, of one rank.
        rank: r.
        world_size: W.
        drop_last: leave the partial global micro-batch out.
        training: deal for training rather than evaluation.
        offset: position in the epoch's order of the first sample that is dealt.
    """

    samples: int
    batch_size: int
    rank: int
    world_size: int
    drop_last: bool
    training: bool
    offset: int = 0

    def rest(self, done: int) -> Deal:
        """Deal what is left of the order after ``done`` samples, as an epoch of its own."""
        return replace(self, samples=max(0, self.samples - done), offset=self.offset + done)

    @property
    def stride(self) -> int:
        """Samples in a whole global micro-batch."""
        return self.batch_size * self.world_size

    @property
    def whole(self) -> int:
        """How many global micro-batches are whole, and dealt as such."""
        return self.samples // self.stride - (len(self.tail) == 2)

    @property
    def tail(self) -> tuple[tuple[int, int], ...]:
        """Start and samples of those that are not: none, one or two."""
        whole, rest = divmod(self.samples, self.stride)
        if rest == 0 or self.drop_last:
            return ()
        start = whole * self.stride
        if self.training or not splits(self.stride, rest, self.world_size) or whole == 0:
            return ((start, rest),)
        start -= self.stride
        first, second = halves(self.stride + rest)
        return ((start, first), (start + first, second))

    @property
    def length(self) -> int:
        """Micro-batches of the epoch, the same on every rank."""
        return self.whole + len(self.tail)

    def shards(self, first: int = 0) -> Iterator[list[BatchShard]]:
        """Yield this rank's shares from micro-batch ``first`` on, a block at a time."""
        whole, tail, stride = self.whole, self.tail, self.stride
        offset = self.offset + self.rank * self.batch_size
        while first < whole:
            stop = min(whole, first + self._block)
            starts = range(first * stride + offset, stop * stride + offset, stride)
            fields = zip(repeat(self.batch_size), repeat(stride), repeat(False), starts)
            # Not `BatchShard(...)`, which would be a Python call for each micro-batch.
            yield list(map(tuple.__new__, repeat(BatchShard), fields))
            first = stop
        yield [self._share(*part) for part in tail[first - whole :]]

    def indices(self, order: Order, first: int = 0) -> Iterator[list[list[int]]]:
        """Yield the sample indices of this rank's micro-batches from ``first`` on, a block at a time."""
        whole, tail, stride = self.whole, self.tail, self.stride
        within = torch.arange(self.batch_size, dtype=torch.int64, device="cpu")
        within += self.offset + self.rank * self.batch_size
        while first < whole:
            stop = min(whole, first + self._block)
            starts = torch.arange(first, stop, dtype=torch.int64, device="cpu") * stride
            yield order(starts[:, None] + within).tolist()
            first = stop
        for part in tail[first - whole :]:
            shard = self._share(*part)
            stop = shard.start + max(shard.samples, 1)
            yield [order(torch.arange(shard.start, stop, dtype=torch.int64, device="cpu")).tolist()]

    def _share(self, start: int, total: int) -> BatchShard:
        return share_of(self.offset + start, total, self.rank, self.world_size)

    @property
    def _block(self) -> int:
        return max(1, _BLOCK_SAMPLES // self.batch_size)


def splits(before: int, rest: int, world_size: int) -> bool:
    """Tell whether ``rest`` samples leave ranks without any, which dealing them with those ``before`` would cure."""
    return rest < world_size and before + rest >= 2 * world_size


def halves(samples: int) -> tuple[int, int]:
    """Split in two nearly equal parts, the larger first."""
    return samples - samples // 2, samples // 2
