"""Sharding for training and evaluation, with all ranks simulated in one process, and the keyed permutation of an epoch:
a bijection, a pure function of its key, and of constant size.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from itertools import accumulate, chain, cycle, islice, product
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from drivetrain._data.batch_source import BatchSource
from drivetrain._data.loaders import prepare_loader  # private: all ranks are simulated in one process
from drivetrain._data.sharding import BatchShare, EpochOffset
from drivetrain.data import order
from drivetrain.errors import ConfigurationError
from oracle.data_loaders import Ragged
from oracle.dealing import GlobalBatch, deal, deal_evaluation
from oracle.program import Data


class Numbers(Dataset[int]):
    """Sample i is i; records which samples were read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Shuffled(Sampler[int]):
    """A custom sampler that draws from the global generator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.length).tolist()


class Rotating(Shuffled):
    """A custom sampler whose order depends on `set_epoch`."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(index + self.epoch) % self.length for index in range(self.length)])


def loader(length: int, batch_size: int, order: str = "sequential", **options: Any) -> DataLoader[int]:
    """Return a loader whose samples are in one of the orders."""
    if order == "batch sampler":
        return DataLoader(Numbers(length), batch_sampler=Ragged(Data("batch_sampler", length, batch_size)))
    if order in ("custom", "weighted", "subset"):
        options["sampler"] = {
            "custom": Shuffled(length),
            "weighted": WeightedRandomSampler([1.0] * length, length, replacement=False),
            "subset": SubsetRandomSampler(range(length)),
        }[order]
    return DataLoader(Numbers(length), batch_size, shuffle=order == "shuffled" or None, **options)


Step = list[tuple[list[int], BatchShare]]


def sources(loader_of: Any, world_size: int, **options: Any) -> list[BatchSource]:
    options = {"training": True, "seed": 3} | options
    return [prepare_loader(loader_of(), rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def steps(ranks: list[BatchSource], epoch: int = 0, start: int = 0) -> list[Step]:
    """Return the indices and the shard of every rank for each global micro-batch; assert that all have as many."""
    epochs = [[(batch.tolist(), shard) for batch, shard in source.epoch(epoch, start)] for source in ranks]
    assert len({len(batches) for batches in epochs}) == 1
    for source in ranks:
        assert source.length in (None, len(epochs[0]) + start)
        assert source.shares_known
    return [list(step) for step in zip(*epochs, strict=True)]


def samples_of(found: list[Step]) -> list[int]:
    return [index for step in found for batch, shard in step if not shard.joins for index in batch]


def assert_dealt(found: list[Step], dealt: list[GlobalBatch]) -> None:
    """Assert that each rank has its part of each global micro-batch, in the order of ranks, or joins with a copy."""
    position = 0
    assert len(found) == len(dealt)
    for step, parts in zip(found, dealt, strict=True):
        held = list(chain.from_iterable(parts))
        starts = accumulate(map(len, parts), initial=position)
        assert step == [
            (part, BatchShare(len(part), len(held), False, start))
            if part
            else (held[:1], BatchShare(0, len(held), True, position))
            for part, start in zip(parts, starts, strict=False)
        ]
        position += len(held)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("order", ["sequential", "shuffled", "custom", "batch sampler"])
@pytest.mark.parametrize("training", [False, True])
def test_every_sample_is_dealt_exactly_once(order: str, drop_last: bool, training: bool) -> None:  # B-04, B-11
    def ranks_of(length: int, world_size: int, batch_size: int) -> list[BatchSource]:
        return sources(lambda: loader(length, batch_size, order, drop_last=drop_last), world_size, training=training)

    kind = "batch_sampler" if order == "batch sampler" else "map"
    for length, world_size, batch_size in product((1, 2, 3, 5, 8, 17, 32, 33, 65, 102), (1, 2, 3, 4, 7), (1, 3, 8)):
        whole = samples_of(steps(ranks_of(length, 1, length), epoch=2))
        assert sorted(whole) == list(range(length))
        dealt = deal(Data(kind, length, batch_size, drop_last=drop_last), whole, world_size)
        if not dealt:
            with pytest.raises(ConfigurationError, match="no batch"):
                ranks_of(length, world_size, batch_size)
            continue
        ranks = ranks_of(length, world_size, batch_size)
        for source in ranks:
            torch.manual_seed(id(source) % 1000)  # the ranks' own generators differ
        found = steps(ranks, epoch=2)
        if not training and kind == "batch_sampler":  # the oracle does not state how
            dealt = [[[] if shard.joins else batch for batch, shard in step] for step in found]
            assert samples_of(found) == whole
        elif not training:
            dealt = deal_evaluation(sum(map(len, chain.from_iterable(dealt))), batch_size, world_size)
            dealt = [[[whole[place] for place in part] for part in parts] for parts in dealt]
        assert_dealt(found, dealt)


@pytest.mark.parametrize("order", ["shuffled", "custom", "weighted", "subset", "batch sampler"])
@pytest.mark.parametrize("training", [False, True])
def test_starts_anywhere_without_reading_what_it_skips(order: str, training: bool) -> None:  # F-02, F-03
    whole = steps(sources(lambda: loader(50, 4, order), 2, training=training), epoch=1)
    for start in range(len(whole) + 1):
        loaders: list[Any] = [loader(50, 4, order) for _ in range(2)]
        left = iter(loaders)
        assert steps(sources(lambda left=left: next(left), 2, training=training), 1, start) == whole[start:]
        for rank in (0, 1):
            assert loaders[rank].dataset.read == [index for step in whole[start:] for index in step[rank][0]]


@pytest.mark.parametrize("order", ["sequential", "shuffled", "weighted", "batch sampler"])
@pytest.mark.parametrize(("before", "after"), [((2, 8), (4, 8)), ((4, 4), (1, 8)), ((1, 5), (3, 7)), ((3, 7), (2, 1))])
@pytest.mark.parametrize("done", [1, 3])
def test_the_rest_of_an_epoch_is_sharded_anew(order: str, before: Any, after: Any, done: int) -> None:  # F-02
    def read(world_size: int, batch_size: int, *position: Any) -> list[Step]:
        ranks = sources(lambda: loader(102, batch_size, order), world_size)
        epochs = [[(batch.tolist(), shard) for batch, shard in source.epoch(3, *position)] for source in ranks]
        return [list(step) for step in zip(*epochs, strict=True)]

    whole = samples_of(read(1, 102))
    assert sorted(whole) == list(range(102))
    seen = samples_of(read(*before)[:done])
    origin = EpochOffset(len(seen), 11)
    rest = read(*after, 11, origin)
    assert whole == seen + samples_of(rest)  # in the epoch's order
    # After a second stop within that epoch, the run resumes at any micro-batch of the new sharding.
    assert [samples_of([step]) for step in read(*after, 12, origin)] == [samples_of([step]) for step in rest[1:]]


class Bulk(Numbers):
    def __getitem__(self, index: Any) -> Any:
        assert type(index) is list
        return torch.tensor(index)


def test_samplers_of_torch_are_replaced() -> None:
    expected = steps(sources(lambda: loader(50, 4, "shuffled"), 2))
    batches: Any = BatchSampler(RandomSampler(range(50)), 4, False)
    distributed: Any = DistributedSampler(Numbers(50), num_replicas=2, rank=1)
    for given in (
        lambda: DataLoader(Numbers(50), batch_sampler=batches),
        lambda: DataLoader(Numbers(50), 4, sampler=distributed),
        lambda: DataLoader(Bulk(50), batch_size=None, sampler=batches),
        lambda: DataLoader(Bulk(50), batch_size=None, sampler=batches, num_workers=1),
    ):
        ranks = sources(given, 2)
        assert steps(ranks) == expected
        for source in ranks:
            source.close()


def test_a_sampler_of_one_ranks_part_is_not_sharded_again() -> None:
    class CustomPart(DistributedSampler[int]):
        """A subclass may order its part as it likes."""

    read = []
    for rank in (0, 1):
        part = CustomPart(Numbers(20), num_replicas=2, rank=rank, shuffle=False)
        source = prepare_loader(loader(20, 4, sampler=part), training=True, rank=rank, world_size=2)
        assert (source.length, source.shares_known) == (3, False)
        pairs = list(source.epoch(0))
        assert [(shard.samples, shard.total) for _, shard in pairs] == [(4, None), (4, None), (2, None)]
        read += [index for batch, _ in pairs for index in batch.tolist()]
    assert sorted(read) == list(range(20))


class Endless(Sampler[int]):
    """As the infinite samplers of detection recipes: it never ends and has no length."""

    def __iter__(self) -> Iterator[int]:
        return cycle(range(5))


def test_an_endless_sampler_is_sharded_without_being_read_to_its_end() -> None:
    ranks = sources(lambda: loader(5, 2, sampler=Endless()), 2)
    assert [source.length for source in ranks] == [None, None]
    epochs = [[(batch.tolist(), shard) for batch, shard in islice(source.epoch(0), 70)] for source in ranks]
    samples = list(islice(cycle(range(5)), 70 * 4))
    assert_dealt(list(map(list, zip(*epochs, strict=True))), deal(Data("map", len(samples), 2), samples, 2))


def test_a_sampler_with_its_own_generator_draws_by_seed_and_epoch_and_leaves_the_generator_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()

    def read(world_size: int, seed: int = 3, epoch: int = 0) -> list[int]:
        sampler = WeightedRandomSampler(range(1, 21), 30, generator=generator)
        return samples_of(steps(sources(lambda: loader(20, 4, sampler=sampler), world_size, seed=seed), epoch))

    drawn = read(2)
    assert (len(drawn), read(2), read(1)) == (30, drawn, drawn)
    assert drawn not in (read(2, seed=4), read(2, epoch=1))
    assert torch.equal(generator.get_state(), before)


def test_set_epoch_of_a_custom_sampler_is_called() -> None:
    source = prepare_loader(loader(4, 4, sampler=Rotating(4)), training=True)
    first = [next(source.epoch(epoch))[0].tolist() for epoch in (0, 1, 3)]
    assert first == [[0, 1, 2, 3], [1, 2, 3, 0], [3, 0, 1, 2]]


def test_use_distributed_sampler_false_leaves_the_loader_alone() -> None:
    plain = loader(20, 3, "shuffled", generator=torch.Generator().manual_seed(1))
    expected = [batch.tolist() for batch in plain]
    plain.generator.manual_seed(1)
    source = prepare_loader(plain, training=True, replace_sampler=False)
    pairs = list(source.epoch(0))
    assert [batch.tolist() for batch, _ in pairs] == expected
    assert [shard.samples for _, shard in pairs] == [3] * 6 + [2]
    assert (source.shares_known, source.length) == (True, 7)
    several = prepare_loader(plain, training=True, rank=1, world_size=2, replace_sampler=False)
    assert (several.shares_known, several.length) == (False, 7)
    assert {shard.total for _, shard in several.epoch(0)} == {None}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_prediction_keeps_the_order_of_the_data_set(world_size: int) -> None:
    # B-04: no duplicates, all samples, in the order that the shards specify.
    for length in (3, 4, 17, 65, 102):
        given = lambda length=length: loader(length, 8, "shuffled", drop_last=True)  # noqa: E731
        found = steps(sources(given, world_size, training=False, predicting=True))
        outputs = [(shard.start, batch) for step in found for batch, shard in step if not shard.joins]
        assert [index for _, batch in sorted(outputs) for index in batch] == list(range(length))


def test_a_data_set_of_batches_is_divided_by_batches() -> None:
    batches: Any = [torch.full((index + 1,), index) for index in range(7)]
    parts = []
    for source in sources(lambda: DataLoader(batches, batch_size=None, shuffle=True), 3):
        pairs = list(source.epoch(0))
        assert (len(pairs), source.length, source.shares_known) == (3, 3, False)
        assert [shard.samples for _, shard in pairs] == [0 if shard.joins else len(batch) for batch, shard in pairs]
        parts += [int(batch[0]) for batch, shard in pairs if not shard.joins]
    assert sorted(parts) == list(range(7))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 16, 1000, 2**16 - 1, 2**16, 2**16 + 1, 70_001])
def test_an_order_is_a_permutation(length: int) -> None:
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
    assert [shuffled[position] for position in (0, 1, length - 1)] == every[[0, 1, -1]].tolist()
    assert torch.equal(shuffled(block), every[block])
    with pytest.raises(IndexError):
        shuffled[length]


@pytest.mark.parametrize("length", [1000, 90_000])
def test_an_order_is_spread_evenly(length: int) -> None:
    # Where the first position goes over many keys, and how neighbours lie, are uniform within five deviations.
    first_positions = torch.tensor([order(length, seed, 0)[0] for seed in range(400)], dtype=torch.float64) / length
    assert abs(float(first_positions.mean()) - 0.5) < 5 * (1 / 12) ** 0.5 / 20
    found = order(length, 5, 5)(torch.arange(length)).double()
    correlation = torch.corrcoef(torch.stack([found[:-1], found[1:]]))[0, 1]
    assert abs(float(correlation)) < 5 / length**0.5
    of_four = {tuple(order(4, seed, 0)(torch.arange(4)).tolist()) for seed in range(600)}
    assert len(of_four) == 24  # every permutation is reached


def test_a_billion_samples_start_at_once_in_constant_memory() -> None:  # B-11
    tracemalloc.start()
    began = time.perf_counter()
    shuffled = order(10**9, seed=0, epoch=0)
    block = shuffled(torch.arange(10**9 - 64, 10**9))
    elapsed = time.perf_counter() - began
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert elapsed < 0.5
    assert len(set(block.tolist())) == 64
    assert 0 <= int(block.min()) <= int(block.max()) < 10**9
