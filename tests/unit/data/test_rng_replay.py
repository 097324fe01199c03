"""Batches that were read ahead are read again after a resume, with the same random numbers: F-02."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from drivetrain._runtime.generators import generator_states, restore_generators
from drivetrain.data._rng_replay import RngReplay
from drivetrain.data._sharding import BatchShard

CPU = torch.device("cpu")


def drawing(first: int, length: int) -> Iterator[tuple[Any, BatchShard]]:
    """A data set that augments: each batch draws from two generators as it is read."""
    for number in range(first, length):
        yield (number, torch.rand(()).item(), random.random()), BatchShard(1, 1, False, number)


def reading(pairs: Iterator[Any], ahead: int) -> Iterator[Any]:
    """Read ``ahead`` batches before the one that is trained on."""
    waiting = list(islice(pairs, ahead))
    for pair in pairs:
        waiting.append(pair)
        yield waiting.pop(0)
    yield from waiting


class Run:
    """A training loop that draws a mask for each batch, and can be saved after any of them."""

    def __init__(self) -> None:
        self.ahead = RngReplay(CPU)
        self.trained = 0
        self.seen: list[Any] = []

    def run(self, stop: int, lookahead: int, noted: bool = True) -> None:
        first = self.trained
        torch.rand(3)  # what building an iterator draws
        pairs = self.ahead.follow(drawing(first, 8), first, (lambda: self.trained) if noted else None)
        for batch, _ in reading(pairs, lookahead):
            self.seen.append((batch, torch.rand(()).item()))
            self.trained += 1
            if self.trained == stop:
                return


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)


@pytest.mark.parametrize(("lookahead", "noted"), [(0, False), (0, True), (1, True), (3, True)])
@pytest.mark.parametrize("stop", [1, 4, 5, 6, 7])
def test_a_resumed_run_draws_as_the_uninterrupted_one(stop: int, lookahead: int, noted: bool) -> None:
    # F-02: whatever was fetched ahead
    seed(3)
    whole = Run()
    whole.run(8, lookahead, noted)
    seed(3)
    saved = Run()
    saved.run(stop, lookahead, noted)
    state = saved.ahead.state(stop)
    assert len(state["ahead"]) == min(lookahead, 8 - stop)
    seed(99)
    resumed = Run()
    resumed.trained = stop
    resumed.ahead.resume(state)
    resumed.run(8, lookahead, noted)
    found = saved.seen + resumed.seen
    # A loop that reads nothing ahead takes no notes: its next batch is drawn after the mask of the last one.
    assert [mask for _, mask in found] == [mask for _, mask in whole.seen]
    assert found == whole.seen or not noted


def test_states_of_generators_are_plain_values_and_restore_every_generator() -> None:
    # F-04
    import numpy

    random.gauss(0, 1)  # leaves half a pair behind
    numpy.random.standard_normal()
    states = generator_states(CPU)
    expected = random.gauss(0, 1), numpy.random.standard_normal(), torch.rand(2)

    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            for child in value.values():
                yield from leaves(child)
        else:
            yield value

    torch.rand(1)
    assert all(isinstance(leaf, torch.Tensor | int | float | str | None) for leaf in leaves(states))
    restore_generators(states, CPU)
    assert random.gauss(0, 1) == expected[0]
    assert numpy.random.standard_normal() == expected[1]
    assert torch.equal(torch.rand(2), expected[2])
