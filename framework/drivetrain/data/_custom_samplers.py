"""Dealing a user's own sampler: its order is kept, and W of its batches make a global one."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch

from drivetrain._runtime.seed import derive_seed
from drivetrain.data._sharding import halves, share_of, splits
from drivetrain.data._worker_seeding import seed_generators

_SAMPLER_DRAWS = 0x73616D70


class Group(NamedTuple):
    """A global micro-batch: rank r's indices are ``indices[bounds[r]:bounds[r + 1]]``."""

    indices: list[Any]
    bounds: list[int]
    whole: bool


def evenly(indices: list[Any], world_size: int) -> Group:
    """Deal what is not a whole global micro-batch."""
    sizes = [share_of(0, len(indices), rank, world_size).samples for rank in range(world_size)]
    return Group(indices, _bounds(sizes), whole=False)


def groups_of_indices(
    stream: Iterable[Any], batch_size: int, world_size: int, drop_last: bool, done: int = 0
) -> Iterator[Group]:
    """Deal a stream of single indices, without its first ``done``."""
    indices = islice(stream, done, None)
    stride = batch_size * world_size
    bounds = _bounds([batch_size] * world_size)
    while len(taken := list(islice(indices, stride))) == stride:
        yield Group(taken, bounds, whole=True)
    if taken and not drop_last:
        yield evenly(taken, world_size)


def groups_of_batches(
    stream: Iterable[Iterable[Any]], world_size: int, drop_last: bool, done: int = 0
) -> Iterator[Group]:
    """Deal a stream of batches of indices, of any size each, without its first ``done`` indices."""
    # A batch of nothing is no batch: it would make a joiner of a rank for no reason.
    batches = filter(None, map(list, stream))
    if done:
        batches = filter(None, _after(batches, done))
    if world_size == 1:
        for batch in batches:
            yield Group(batch, [0, len(batch)], whole=True)
        return
    while len(taken := list(islice(batches, world_size))) == world_size:
        yield Group(_flat(taken), _bounds([len(batch) for batch in taken]), whole=True)
    if taken and not drop_last:
        yield evenly(_flat(taken), world_size)


def without_joiners(groups: Iterator[Group], world_size: int) -> Iterator[Group]:
    """Deal for evaluation: a last group of fewer than W samples is dealt with the one before, as two."""
    held: Group | None = None
    for group in groups:
        if held is None:
            held = group
        elif not group.whole and splits(len(held.indices), len(group.indices), world_size):
            indices = held.indices + group.indices
            first, _ = halves(len(indices))
            yield evenly(indices[:first], world_size)
            held = evenly(indices[first:], world_size)
        else:
            yield held
            held = group
    if held is not None:
        yield held


class SamplerRng:
    """The generators that a sampler draws from, alike on every rank; used as a context around its draws.

    The process's own generators, and those given to the sampler, are put back afterwards: what a sampler draws
    changes nothing for the model, and the other way round.

    Args:
        seed: the seed of the run.
        epoch: the epoch that the sampler draws for.
        generators: the sampler's own generators.
    """

    def __init__(self, seed: int, epoch: int, generators: Iterable[torch.Generator]) -> None:
        self._seed = derive_seed(_SAMPLER_DRAWS, seed, epoch)
        self._generators = (torch.default_generator, *generators)
        self._inside: _States | None = None
        self._outside: _States | None = None

    def __enter__(self) -> None:
        self._outside = _States(self._generators)
        if self._inside is not None:
            self._inside.restore()
            return
        seed_generators(self._seed)
        for generator in self._generators:
            generator.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        self._inside = _States(self._generators)
        if self._outside is not None:
            self._outside.restore()


class _States:
    """Where the generators stand."""

    def __init__(self, generators: tuple[torch.Generator, ...]) -> None:
        self._python = random.getstate()
        self._torch = [(generator, generator.get_state()) for generator in generators]
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        random.setstate(self._python)
        for generator, state in self._torch:
            generator.set_state(state)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _bounds(sizes: list[int]) -> list[int]:
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return bounds


def _after(batches: Iterator[list[Any]], done: int) -> Iterator[list[Any]]:
    for batch in batches:
        yield batch[min(done, len(batch)) :]
        done = max(0, done - len(batch))


def _flat(batches: list[list[Any]]) -> list[Any]:
    return [index for batch in batches for index in batch]
