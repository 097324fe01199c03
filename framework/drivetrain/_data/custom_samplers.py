"""Shards a custom sampler in the sampler's order. A global batch is ``world_size`` consecutive batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch

from drivetrain._data.sharding import compute_shard, should_rebalance, split_in_half
from drivetrain._data.worker_seeding import seed_generators
from drivetrain._runtime.generators import generators_restorer
from drivetrain._runtime.seed import derive_seed

_SAMPLER_SEED_SALT = 0x73616D70

_CPU = torch.device("cpu")


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
    sizes = [compute_shard(0, len(indices), rank, world_size).samples for rank in range(world_size)]
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
        seed_generators(self._seed)
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
