"""Samplers that replace a `DataLoader`'s sampler: they request this rank's samples and report each request's shard."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice
from typing import Any, TypeVar

import torch

from drivetrain._data.custom_samplers import GlobalBatch, SamplerRng
from drivetrain._data.sample_order import Order
from drivetrain._data.sharding import EPOCH_START, BatchShare, EpochOffset, EpochSharding
from drivetrain._data.worker_seeding import KeyedIndex, KeyedIndices, MicroBatchKey
from drivetrain._runtime.generators import generator_states, restore_generators

Entry = TypeVar("Entry")

_CPU = torch.device("cpu")

# Number of global micro-batches that are read from a custom sampler at a time. For each such block, the generators are
# exchanged, which is slow.
_BLOCK_SIZE = 32


class RankSampler(ABC):
    """Batch sampler (or sampler) of this rank's part, which can start at any micro-batch of any epoch.

    Args:
        length_of: returns the number of micro-batches that the sampler declares for an epoch now; None if it declares
            no length.
        prebatched: whether the data set holds whole batches, so that a request is a single index rather than a list.
        keyed: whether each request carries the key of its micro-batch, which worker processes need.
    """

    length_is_exact = False
    """Whether every epoch has exactly ``length`` micro-batches."""

    def __init__(self, length_of: Callable[[], int | None], prebatched: bool, keyed: bool) -> None:
        self._length_of = length_of
        self.length = length_of()
        self._prebatched = prebatched
        self._keyed = keyed
        self._begun: tuple[Any, ...] = (0, 0, EPOCH_START)
        self.requested: deque[list[Any]] | None = None
        """A queue that receives the indices of each request when it is made; None if indices are not recorded."""
        self.state: dict[str, Any] = {}
        """What a checkpoint holds of the sampler; see `BatchSource.state_dict`. It is replaced, never changed."""

    def refresh(self) -> None:
        """Use the present size of the data from the next epoch on."""
        self.length = self._length_of()

    @abstractmethod
    def begin(self, epoch: int, start: int, origin: EpochOffset = EPOCH_START) -> Iterator[BatchShare]:
        """Set where the next iteration starts, and return the shards of its requests; see `BatchSource.epoch`."""

    def shards(self, start: int, origin: EpochOffset = EPOCH_START) -> Iterator[BatchShare] | None:
        """Return the shards that `begin` would return; None if they are known only after the sampler is read."""
        return None

    @abstractmethod
    def count(self, epoch: int) -> int | None:
        """See `BatchSource`."""

    @abstractmethod
    def _blocks(self, *begun: Any) -> Iterator[list[Any]]:
        """Yield the requests of the epoch that `begin` set, in blocks of several micro-batches."""

    def __iter__(self) -> Iterator[Any]:
        # `DataLoader` may create two iterators and use the second, so nothing is drawn before the first `next`.
        return chain.from_iterable(self._blocks(*self._begun))

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the sampler has no length")
        return self.length

    def _requests(self, block: list[list[Any]], epoch: int, first: int) -> list[Any]:
        if self.requested is not None:
            self.requested.extend(block)
        if not self._keyed:
            return [indices[0] for indices in block] if self._prebatched else block
        keys = map(MicroBatchKey._make, zip([epoch] * len(block), count(first), strict=False))
        if self._prebatched:
            return [KeyedIndex(indices[0], key) for indices, key in zip(block, keys, strict=True)]
        requests = []
        for indices, key in zip(block, keys, strict=True):
            request = KeyedIndices(indices)
            request.key = key
            requests.append(request)
        return requests


class ShardedSampler(RankSampler):
    """`RankSampler` over an `Order`. It starts at any micro-batch without iterating over the preceding ones.

    Args:
        sharding_of: returns how an epoch is sharded over the ranks, for the present size of the data.
        order_of: takes the number of samples and the number of an epoch, and returns the order.
        prebatched: see `RankSampler`.
        keyed: see `RankSampler`.
    """

    length_is_exact = True

    def __init__(
        self,
        sharding_of: Callable[[], EpochSharding],
        order_of: Callable[[int, int], Order],
        prebatched: bool,
        keyed: bool,
    ) -> None:
        self._sharding_of = sharding_of
        self._sharding = sharding_of()
        self._order_of = order_of
        super().__init__(lambda: self._sharding.length, prebatched, keyed)

    def refresh(self) -> None:
        self._sharding = self._sharding_of()
        super().refresh()

    def begin(self, epoch: int, start: int, origin: EpochOffset = EPOCH_START) -> Iterator[BatchShare]:
        self._begun = epoch, start, origin
        return self.shards(start, origin)

    def shards(self, start: int, origin: EpochOffset = EPOCH_START) -> Iterator[BatchShare]:
        return chain.from_iterable(self._sharding.remaining(origin.samples).shards(start - origin.number))

    def count(self, epoch: int) -> int | None:
        return self.length

    def _blocks(self, epoch: int, first: int, origin: EpochOffset) -> Iterator[list[Any]]:
        order = self._order_of(self._sharding.samples, epoch)
        for block in self._sharding.remaining(origin.samples).indices(order, first - origin.number):
            yield self._requests(block, epoch, first)
            first += len(block)


class ShardedCustomSampler(RankSampler):
    """`RankSampler` that shards a custom sampler and keeps the sampler's order.

    Every rank iterates the whole custom sampler and selects its own part, so that all ranks know all shards. To start
    within an epoch, the indices before the start are iterated over, but their samples are not read.

    Args:
        start_groups: restarts the sampler, skips the given number of samples and returns the global micro-batches.
        rng_for_epoch: returns the generators that the sampler draws from in an epoch; None if the sampler draws from
            the process's generators.
        rank: this process's data rank.
        rank_local: whether the samplers of other ranks are unknown, so that the samples of all ranks cannot be counted.
        length_of: see `RankSampler`.
        prebatched: see `RankSampler`.
        keyed: see `RankSampler`.
    """

    def __init__(
        self,
        start_groups: Callable[[int], Iterator[GlobalBatch]],
        rng_for_epoch: Callable[[int], SamplerRng] | None,
        rank: int,
        rank_local: bool,
        length_of: Callable[[], int | None],
        prebatched: bool,
        keyed: bool,
    ) -> None:
        super().__init__(length_of, prebatched, keyed)
        self._start_groups = start_groups
        self._rng_for_epoch = rng_for_epoch
        self._rank = rank
        self._rank_local = rank_local
        self.state = {"began": None}  # the generators' states at the start of the epoch
        self.first: list[GlobalBatch] | None = None
        """The first block of global micro-batches that was drawn."""

    def begin(self, epoch: int, start: int, origin: EpochOffset = EPOCH_START) -> Iterator[BatchShare]:
        shards: deque[BatchShare] = deque()
        self._begun = epoch, start, origin, shards
        return drain(shards)

    def count(self, epoch: int) -> int | None:
        if self._rng_for_epoch is None:
            return None  # Counting would draw from the process's generators.
        return sum(len(groups) for groups in self._read_groups(epoch, 0, EPOCH_START))

    def _blocks(self, epoch: int, start: int, origin: EpochOffset, shards: deque[BatchShare]) -> Iterator[list[Any]]:
        position, number = origin
        for groups in self._read_groups(epoch, start, origin):
            if self.first is None:
                self.first = groups
            first = number
            number += len(groups)
            requests = []
            for group in groups:
                if first < start:
                    first += 1
                    position += len(group.indices)
                    continue
                indices, bounds, _ = group
                low, high = bounds[self._rank], bounds[self._rank + 1]
                total = None if self._rank_local else len(indices)
                if low == high:
                    requests.append(indices[:1])
                    shards.append(BatchShare(0, total, True, position))
                else:
                    requests.append(indices[low:high])
                    shards.append(BatchShare(high - low, total, False, position + low))
                position += len(indices)
            if requests:
                yield self._requests(requests, epoch, first)

    def _read_groups(self, epoch: int, start: int, origin: EpochOffset) -> Iterator[list[GlobalBatch]]:
        if self._rng_for_epoch is None:
            # Read one group at a time, so that the sampler draws when it would in a plain PyTorch loop.
            for group in self._read_with_process_rng(start, origin):
                yield [group]
            return
        rng = self._rng_for_epoch(epoch)
        groups: Iterator[GlobalBatch] | None = None
        while True:
            with rng:
                if groups is None:
                    groups = self._start_groups(origin.samples)
                block = list(islice(groups, _BLOCK_SIZE))
            if not block:
                return
            yield block

    def _read_with_process_rng(self, start: int, origin: EpochOffset) -> Iterator[GlobalBatch]:
        """Start the sampler, and return its global micro-batches.

        If the run resumes within an epoch, the micro-batches before the start are drawn again with the states that the
        generators had at the epoch's start.
        """
        groups = self._start_groups(origin.samples)
        if start == 0 or self.state["began"] is None:
            self.state = {"began": generator_states(_CPU)}
            return groups
        current_states = generator_states(_CPU)
        restore_generators(self.state["began"], _CPU)
        first = list(islice(groups, start - origin.number + 1))
        restore_generators(current_states, _CPU)
        return chain(first, groups)


def drain(queue: deque[Entry]) -> Iterator[Entry]:
    """Pop and yield the entries of a queue until it is empty, including those that are added in the meantime."""
    while queue:
        yield queue.popleft()


def len_or_none(sampler: Iterable[Any]) -> int | None:
    """Return ``len(sampler)``, or None if it has no length."""
    try:
        return len(sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
