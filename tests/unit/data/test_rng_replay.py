"""Batches that were read ahead are read again after a resume, with the same random numbers: F-02."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy
import pytest
import torch

from drivetrain._runtime.generators import generator_states, restore_generators
from drivetrain.data._rng_replay import RngReplay
from drivetrain.data._sharding import BatchShard

CPU = torch.device("cpu")


def drawing(first: int) -> Iterator[tuple[Any, BatchShard]]:
    """A data set of eight batches that augments: each draws from two generators as it is read."""
    for number in range(first, 8):
        yield (number, torch.rand(()).item(), random.random()), BatchShard(1, 1, False, number)


def train(replay: RngReplay, first: int, stop: int, lookahead: int, noted: bool) -> list[Any]:
    """Read ``lookahead`` batches before the one that is trained on; return each batch and the mask drawn for it."""
    seen: list[Any] = []
    torch.rand(3)  # what building an iterator draws
    pairs = replay.follow(drawing(first), first, (lambda: first + len(seen)) if noted else None)
    waiting = deque(islice(pairs, lookahead))
    while first + len(seen) < stop:
        waiting.extend(islice(pairs, 1))
        batch, _ = waiting.popleft()
        seen.append((batch, torch.rand(()).item()))
    return seen


def seeded(value: int) -> RngReplay:
    torch.manual_seed(value)
    random.seed(value)
    return RngReplay(CPU)


@pytest.mark.parametrize(("lookahead", "noted"), [(0, False), (0, True), (1, True), (3, True)])
@pytest.mark.parametrize("stop", [1, 4, 5, 6, 7])
def test_a_resumed_run_draws_as_the_uninterrupted_one(stop: int, lookahead: int, noted: bool) -> None:
    # F-02: whatever was fetched ahead
    whole = train(seeded(3), 0, 8, lookahead, noted)
    saved = seeded(3)
    found = train(saved, 0, stop, lookahead, noted)
    state = saved.state(stop)
    assert len(state["ahead"]) == min(lookahead, 8 - stop)
    resumed = seeded(99)
    resumed.resume(state)
    found += train(resumed, stop, 8, lookahead, noted)
    # A loop that reads nothing ahead takes no notes: its next batch is drawn after the mask of the last one.
    assert [mask for _, mask in found] == [mask for _, mask in whole]
    assert found == whole or not noted


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for child in value.values():
            yield from leaves(child)
    else:
        yield value


def test_states_of_generators_are_plain_values_and_restore_every_generator() -> None:
    # F-04
    random.gauss(0, 1)  # leaves half a pair behind
    numpy.random.standard_normal()
    states = generator_states(CPU)
    assert all(isinstance(leaf, torch.Tensor | int | float | str | None) for leaf in leaves(states))
    first = random.gauss(0, 1), numpy.random.standard_normal(), torch.rand(2).tolist()
    restore_generators(states, CPU)
    assert (random.gauss(0, 1), numpy.random.standard_normal(), torch.rand(2).tolist()) == first
