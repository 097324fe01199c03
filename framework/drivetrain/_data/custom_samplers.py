"""Shards a custom sampler in the sampler's order. A global batch is ``world_size`` consecutive batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler

from drivetrain._data.samplers import LoaderSharding, RankSampler, drain, len_or_none
from drivetrain._data.sharding import (
    EPOCH_START,
    BatchShare,
    EpochOffset,
    compute_share,
    should_rebalance,
    split_in_half,
)
from drivetrain._runtime.generators import generator_states, generators_restorer, restore_generators
from drivetrain._runtime.seed import derive_seed, seed_generators_of

_SAMPLER_SEED_SALT = 0x73616D70

_CPU = torch.device("cpu")

# Number of global micro-batches that are read from a custom sampler at a time. For each such block, the generators are
# exchanged, which is slow.
_BLOCK_SIZE = 32


class ShardedCustomSampler(RankSampler):
    """`RankSampler` that shards a custom sampler and keeps the sampler's order.

    Every rank iterates the whole custom sampler and selects its own part, so that all ranks know all shares. To start
    within an epoch, the indices before the start are iterated over, but their samples are not read.

    Args:
        sampler: the loader's batch sampler, or its sampler if ``prebatched``.
        sharding: how the sampler is sharded.
        rank_local: whether the sampler yields this rank's part only, so that it is read in full, and the samples of all
            ranks cannot be counted.
        prebatched: see `RankSampler`.
        keyed: see `RankSampler`.
    """

    def __init__(self, sampler: Any, sharding: LoaderSharding, rank_local: bool, prebatched: bool, keyed: bool) -> None:
        self._sharding = sharding
        self._splits = splits = sharding.replace_sampler and not rank_local
        self._rank_local = rank_local
        self._rank, self._world_size = (0, 1) if rank_local else (sharding.rank, sharding.world_size)
        keeps_all = prebatched or (sharding.predicting and splits)
        self._drop_last = bool(getattr(sampler, "drop_last", False)) and not keeps_all
        self._stream, self._batch_size = sampler, 1 if prebatched else None  # None: a stream of batches of any size
        if not prebatched and type(sampler) is BatchSampler and splits:
            self._stream, self._batch_size = sampler.sampler, sampler.batch_size
        self.nested = nested_samplers(sampler)
        """The custom sampler and the samplers nested in it, outermost first."""
        generators = (getattr(part, "generator", None) for part in self.nested)
        self._generators = [each for each in generators if isinstance(each, torch.Generator)]
        self.first: list[GlobalBatch] | None = None
        """The first block of global micro-batches that was drawn."""
        super().__init__(prebatched, keyed)
        self.state = {"began": None}  # the generators' states at the start of the epoch

    def refresh(self) -> None:
        length, divisor = len_or_none(self._stream), self._world_size * (self._batch_size or 1)
        self.length = None if length is None else length // divisor if self._drop_last else -(-length // divisor)

    def _start_groups(self, skip: int) -> Iterator[GlobalBatch]:
        """Restart the sampler, skip a number of samples, and return the global micro-batches."""
        if self._batch_size is None:
            groups = group_batches(self._stream, self._world_size, self._drop_last, skip)
        else:
            groups = group_indices(self._stream, self._batch_size, self._world_size, self._drop_last, skip)
        return groups if self._sharding.training or not self._splits else rebalance_tail(groups, self._world_size)

    def begin(self, epoch: int, start: int, origin: EpochOffset = EPOCH_START) -> Iterator[BatchShare]:
        shares: deque[BatchShare] = deque()
        self._begun = epoch, start, origin, shares
        return drain(shares)

    def count(self, epoch: int) -> int | None:
        if not self._splits:
            return None  # Counting would draw from the process's generators.
        return sum(len(groups) for groups in self._read_groups(epoch, 0, EPOCH_START))

    def _blocks(self, epoch: int, start: int, origin: EpochOffset, shares: deque[BatchShare]) -> Iterator[list[Any]]:
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
                    shares.append(BatchShare(0, total, True, position))
                else:
                    requests.append(indices[low:high])
                    shares.append(BatchShare(high - low, total, False, position + low))
                position += len(indices)
            if requests:
                yield self._requests(requests, epoch, first)

    def _read_groups(self, epoch: int, start: int, origin: EpochOffset) -> Iterator[list[GlobalBatch]]:
        if not self._splits:
            # Read one group at a time, so that the sampler draws when it would in a plain PyTorch loop.
            for group in self._read_with_process_rng(start, origin):
                yield [group]
            return
        rng = SamplerRng(self._sharding.seed, epoch, self._generators)
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


def nested_samplers(sampler: Any) -> tuple[Any, ...]:
    """Return a sampler and the samplers nested in it, outermost first."""
    parts: list[Any] = []
    while sampler is not None and len(parts) < 8:
        parts.append(sampler)
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return tuple(parts)


class GlobalBatch(NamedTuple):
    """The indices of a global batch, of which rank r reads ``indices[bounds[r]:bounds[r + 1]]``.

    Attributes:
        indices: the indices of all ranks.
        bounds: where each rank's slice begins, and where the last slice ends.
        is_whole: whether every rank has a whole batch.
    """

    indices: list[Any]
    bounds: list[int]
    is_whole: bool


def split_evenly(indices: list[Any], world_size: int) -> GlobalBatch:
    """Return a partial global batch whose slices differ in size by at most one."""
    sizes = [compute_share(0, len(indices), rank, world_size).samples for rank in range(world_size)]
    return GlobalBatch(indices, _bounds(sizes), is_whole=False)


def group_indices(
    stream: Iterable[Any], batch_size: int, world_size: int, drop_last: bool, skip: int = 0
) -> Iterator[GlobalBatch]:
    """Yield global batches from a stream of single indices, after skipping the first ``skip`` indices."""
    indices = islice(stream, skip, None)
    stride = batch_size * world_size
    bounds = _bounds([batch_size] * world_size)
    while len(chunk := list(islice(indices, stride))) == stride:
        yield GlobalBatch(chunk, bounds, is_whole=True)
    if chunk and not drop_last:
        yield split_evenly(chunk, world_size)


def group_batches(
    stream: Iterable[Iterable[Any]], world_size: int, drop_last: bool, skip: int = 0
) -> Iterator[GlobalBatch]:
    """Yield global batches from a stream of batches of any size, after skipping the first ``skip`` indices."""
    # Empty batches are dropped, because a rank with an empty batch would have to join a step without samples.
    batches = filter(None, map(list, stream))
    if skip:
        batches = filter(None, _skip_samples(batches, skip))
    if world_size == 1:
        for batch in batches:
            yield GlobalBatch(batch, [0, len(batch)], is_whole=True)
        return
    while len(chunk := list(islice(batches, world_size))) == world_size:
        yield GlobalBatch(_flatten(chunk), _bounds([len(batch) for batch in chunk]), is_whole=True)
    if chunk and not drop_last:
        yield split_evenly(_flatten(chunk), world_size)


def rebalance_tail(groups: Iterator[GlobalBatch], world_size: int) -> Iterator[GlobalBatch]:
    """Redistribute the last two global batches if the last one has fewer than ``world_size`` samples.

    The two resulting micro-batches have nearly equal sizes, so that every rank has samples during evaluation.
    """
    pending: GlobalBatch | None = None
    for group in groups:
        if pending is None:
            pending = group
        elif not group.is_whole and should_rebalance(len(pending.indices), len(group.indices), world_size):
            indices = pending.indices + group.indices
            first, _ = split_in_half(len(indices))
            yield split_evenly(indices[:first], world_size)
            pending = split_evenly(indices[first:], world_size)
        else:
            yield pending
            pending = group
    if pending is not None:
        yield pending


class SamplerRng:
    """Context manager that gives a sampler the same random generators on every rank.

    The generators of the process and of the sampler are restored on exit, so that the sampler and the model do not
    influence each other's random numbers. Entering the context again continues the sampler's random numbers.

    Args:
        seed: the seed of the run.
        epoch: the epoch that the sampler draws for.
        generators: the generators that are attributes of the sampler.
    """

    def __init__(self, seed: int, epoch: int, generators: Iterable[torch.Generator]) -> None:
        self._seed = derive_seed(_SAMPLER_SEED_SALT, seed, epoch)
        self._generators = tuple(generators)
        self._restore_sampler: Callable[[], object] = self._seed_all

    def __enter__(self) -> None:
        self._restore_process = generators_restorer(_CPU, self._generators)
        self._restore_sampler()

    def __exit__(self, *_: object) -> None:
        self._restore_sampler = generators_restorer(_CPU, self._generators)
        self._restore_process()

    def _seed_all(self) -> None:
        seed_generators_of(_CPU, self._seed)
        for generator in self._generators:
            generator.manual_seed(self._seed)


def _bounds(sizes: list[int]) -> list[int]:
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return bounds


def _skip_samples(batches: Iterator[list[Any]], skip: int) -> Iterator[list[Any]]:
    for batch in batches:
        yield batch[min(skip, len(batch)) :]
        skip = max(0, skip - len(batch))


def _flatten(batches: list[list[Any]]) -> list[Any]:
    return [index for batch in batches for index in batch]
