"""The keyed permutation: a bijection, a pure function of its key, and of constant size."""

from __future__ import annotations

import time
import tracemalloc

import pytest
import torch

from drivetrain.data import KeyedPermutation, SequentialOrder, order


@pytest.mark.parametrize("length", [1, 2, 3, 5, 16, 1000, 2**16 - 1, 2**16, 2**16 + 1, 70_001])
def test_is_a_permutation(length: int) -> None:
    found = order(length, seed=1, epoch=0)(torch.arange(length))
    assert torch.equal(found.sort().values, torch.arange(length))


@pytest.mark.parametrize("length", [50, 100_003])
def test_each_position_is_a_pure_function_of_length_seed_and_epoch(length: int) -> None:
    # B-11; F-03: positions that are skipped are not computed.
    shuffled, positions = order(length, 7, 3), torch.arange(length)
    every = shuffled(positions)
    torch.manual_seed(99)
    assert torch.equal(every, order(length, 7, 3)(positions))
    for other in (order(length, 8, 3), order(length, 7, 4)):
        assert (every == other(positions)).float().mean() < 0.2
    block = torch.tensor([[3, 1], [length - 1, 0]])
    for found, expected in ((shuffled, every), (SequentialOrder(length), positions)):
        assert [found[position] for position in (0, 1, length - 1)] == expected[[0, 1, -1]].tolist()
        assert torch.equal(found(block), expected[block])
        assert len(found) == length
        with pytest.raises(IndexError):
            found[length]


@pytest.mark.parametrize("length", [1000, 90_000])
def test_is_spread_evenly(length: int) -> None:
    # Where the first position goes over many keys, and how neighbours lie, are uniform within five deviations.
    first_positions = torch.tensor([order(length, seed, 0)[0] for seed in range(400)], dtype=torch.float64) / length
    assert abs(float(first_positions.mean()) - 0.5) < 5 * (1 / 12) ** 0.5 / 20
    found = order(length, 5, 5)(torch.arange(length)).double()
    correlation = torch.corrcoef(torch.stack([found[:-1], found[1:]]))[0, 1]
    assert abs(float(correlation)) < 5 / length**0.5
    of_four = {tuple(order(4, seed, 0)(torch.arange(4)).tolist()) for seed in range(600)}
    assert len(of_four) == 24  # every permutation is reached


def test_a_billion_samples_start_at_once_in_constant_memory() -> None:
    # B-11
    tracemalloc.start()
    began = time.perf_counter()
    shuffled = KeyedPermutation(10**9, seed=0, epoch=0)
    block = shuffled(torch.arange(10**9 - 64, 10**9))
    elapsed = time.perf_counter() - began
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert elapsed < 0.5
    assert len(set(block.tolist())) == 64
    assert 0 <= int(block.min()) <= int(block.max()) < 10**9 == len(shuffled)
