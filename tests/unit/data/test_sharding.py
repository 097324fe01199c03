"""Sharding for training and evaluation, with all ranks simulated in one process."""

from __future__ import annotations

from collections.abc import Iterator
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

from drivetrain.data._batch_source import BatchSource
from drivetrain.data._loaders import prepare_loader  # private: all ranks are simulated in one process
from drivetrain.data._sharding import BatchShard
from drivetrain.errors import ConfigurationError


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


class Uneven(Sampler[list[int]]):
    """A custom batch sampler with batches of 1, 2, 3, ... samples."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[list[int]]:
        start, size = 0, 1
        while start < self.length:
            yield list(range(start, min(start + size, self.length)))
            start, size = start + size, size + 1


Step = list[tuple[list[int], BatchShard]]


def sources(loader_of: Any, world_size: int, **options: Any) -> list[BatchSource]:
    options = {"training": True, "seed": 3} | options
    return [prepare_loader(loader_of(), rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def steps(ranks: list[BatchSource], epoch: int = 0, start: int = 0) -> list[Step]:
    """Return the indices and the shard of every rank for each global micro-batch; assert that all have as many."""
    epochs = [[(batch.tolist(), shard) for batch, shard in source.epoch(epoch, start)] for source in ranks]
    assert len({len(batches) for batches in epochs}) == 1
    for source in ranks:
        assert source.length in (None, len(epochs[0]) + start)
        assert source.shards_known
    return [list(step) for step in zip(*epochs, strict=True)]


def samples_of(step: Step) -> list[int]:
    return [index for batch, shard in step if not shard.joins for index in batch]


def check(found: list[Step], position: int = 0) -> list[int]:
    """Assert the properties of every sharding, and return the epoch's samples in order."""
    for step in found:
        held = samples_of(step)
        for batch, shard in step:
            assert shard.total == len(held)
            if shard.joins:
                assert (shard.samples, batch, shard.start) == (0, held[:1], position)
            else:
                # Contiguous slices, in the order of ranks.
                assert shard.samples == len(batch) > 0
                assert shard.start - position == held.index(batch[0])
                assert batch == held[shard.start - position :][: len(batch)]
        position += len(held)
    return [index for step in found for index in samples_of(step)]


CASES = [
    (length, world_size, batch_size)
    for length in (1, 2, 3, 5, 8, 17, 31, 32, 33, 65, 102)
    for world_size in (1, 2, 3, 4, 7)
    for batch_size in (1, 2, 3, 8)
]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("order", ["sequential", "shuffled", "custom"])
@pytest.mark.parametrize("training", [False, True])
def test_every_sample_exactly_once(order: str, drop_last: bool, training: bool) -> None:
    # B-04, B-11
    for length, world_size, batch_size in CASES:

        def loader(length: int = length, batch_size: int = batch_size) -> DataLoader[int]:
            how: Any = {"sampler": Shuffled(length)} if order == "custom" else {"shuffle": order == "shuffled"}
            return DataLoader(Numbers(length), batch_size, drop_last=drop_last, **how)

        stride = world_size * batch_size
        kept = length - length % stride if drop_last else length
        if kept == 0:
            with pytest.raises(ConfigurationError, match="no batch"):
                sources(loader, world_size, training=training)
            continue
        ranks = sources(loader, world_size, training=training)
        for source in ranks:
            torch.manual_seed(id(source) % 1000)  # the ranks' own generators differ
        found = steps(ranks, epoch=2)
        seen = check(found)
        assert len(found) == -(-kept // stride)
        assert len(set(seen)) == len(seen) == kept
        assert set(seen) <= set(range(length))
        if order == "sequential":
            assert seen == list(range(kept))
        for step in found:
            sizes = [shard.samples for _, shard in step]
            # Evenly, lower ranks first.
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] - sizes[-1] <= 1
            assert sizes[0] <= batch_size
        if training:
            assert [len(samples_of(step)) for step in found[: length // stride]] == [stride] * (length // stride)
        elif length >= world_size and batch_size >= 2:
            assert not any(shard.joins for step in found for _, shard in step)


def test_the_acceptance_case() -> None:
    # B-04: 102 samples, 4 ranks, batch 8.
    ranks = sources(lambda: DataLoader(Numbers(102), 8, shuffle=True), 4)
    found = steps(ranks)
    assert [[shard.samples for _, shard in step] for step in found] == [[8] * 4] * 3 + [[2, 2, 1, 1]]
    # 98 samples leave 2 for 4 ranks: two join in training ...
    found = steps(sources(lambda: DataLoader(Numbers(98), 8), 4))
    assert [shard.samples for _, shard in found[-1]] == [1, 1, 0, 0]
    assert [batch for batch, _ in found[-1]] == [[96], [97], [96], [96]]
    assert [shard.joins for _, shard in found[-1]] == [False, False, True, True]
    # ... and none in evaluation.
    found = steps(sources(lambda: DataLoader(Numbers(98), 8), 4, training=False))
    assert [[shard.samples for _, shard in step] for step in found[-2:]] == [[5, 4, 4, 4], [5, 4, 4, 4]]


@pytest.mark.parametrize("custom", [False, True])
@pytest.mark.parametrize(("length", "stride"), [(24, 12), (50, 12), (50, 24), (102, 24)])
def test_global_batches_are_the_same_at_every_world_size(length: int, stride: int, custom: bool) -> None:
    # B-11
    orders = []
    for world_size in (1, 2, 3, 4, 6, 12):

        def loader(batch_size: int = stride // world_size) -> DataLoader[int]:
            how: Any = {"sampler": Shuffled(length)} if custom else {"shuffle": True}
            return DataLoader(Numbers(length), batch_size, **how)

        orders.append([samples_of(step) for step in steps(sources(loader, world_size), epoch=4)])
    assert all(other == orders[0] for other in orders)


@pytest.mark.parametrize(
    "loader",
    [
        lambda data: DataLoader(data, 4, shuffle=True),
        lambda data: DataLoader(data, 4, sampler=Shuffled(len(data))),
        lambda data: DataLoader(data, 4, sampler=WeightedRandomSampler([1.0] * 50, 50)),
        lambda data: DataLoader(data, 4, sampler=SubsetRandomSampler(range(len(data)))),
        lambda data: DataLoader(data, batch_sampler=Uneven(len(data))),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_starts_anywhere_without_reading_what_it_skips(loader: Any, training: bool) -> None:
    # F-02, F-03
    whole = steps(sources(lambda: loader(Numbers(50)), 2, training=training), epoch=1)
    for start in range(len(whole) + 1):
        data = [Numbers(50), Numbers(50)]
        left = iter(data)
        assert steps(sources(lambda left=left: loader(next(left)), 2, training=training), 1, start) == whole[start:]
        for rank in (0, 1):
            assert data[rank].read == [index for step in whole[start:] for index in step[rank][0]]


# Custom samplers


def test_a_global_batch_is_one_batch_of_a_batch_sampler_for_each_rank() -> None:
    found = steps(sources(lambda: DataLoader(Numbers(30), batch_sampler=Uneven(30)), 3))
    check(found)
    assert [batch for batch, _ in found[0]] == [[0], [1, 2], [3, 4, 5]]
    assert [batch for batch, _ in found[1]] == [[6, 7, 8, 9], [10, 11, 12, 13, 14], [15, 16, 17, 18, 19, 20]]
    # Two are left for three ranks: they are split evenly.
    assert [batch for batch, _ in found[2]] == [[21, 22, 23], [24, 25, 26], [27, 28, 29]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("training", [False, True])
def test_a_batch_sampler_gives_every_sample_once(world_size: int, training: bool) -> None:
    # B-04
    for length in range(1, 60):
        loader = lambda n=length: DataLoader(Numbers(n), batch_sampler=Uneven(n))  # noqa: E731
        assert check(steps(sources(loader, world_size, training=training))) == list(range(length))


def test_plain_batch_samplers_and_distributed_samplers_are_replaced() -> None:
    expected = check(steps(sources(lambda: DataLoader(Numbers(50), 4, shuffle=True), 2)))

    def in_bulk() -> DataLoader[int]:
        return DataLoader(Numbers(50), batch_sampler=BatchSampler(RandomSampler(range(50)), 4, False))

    def distributed() -> DataLoader[int]:
        return DataLoader(Numbers(50), 4, sampler=DistributedSampler(Numbers(50), num_replicas=2, rank=1))

    assert check(steps(sources(in_bulk, 2))) == expected
    assert check(steps(sources(distributed, 2))) == expected


def test_a_sampler_of_one_ranks_part_is_not_sharded_again() -> None:
    class CustomPart(DistributedSampler[int]):
        """A subclass may order its part as it likes."""

    parts = []
    for rank in (0, 1):
        loader = DataLoader(Numbers(20), 4, sampler=CustomPart(Numbers(20), num_replicas=2, rank=rank, shuffle=False))
        source = prepare_loader(loader, training=True, rank=rank, world_size=2)
        assert (source.length, source.shards_known) == (3, False)
        pairs = list(source.epoch(0))
        assert [shard.samples for _, shard in pairs] == [4, 4, 2]
        assert all(shard.total is None for _, shard in pairs)
        parts.append([index for batch, _ in pairs for index in batch.tolist()])
    assert sorted(parts[0] + parts[1]) == list(range(20))


def test_set_epoch_of_a_custom_sampler_is_called() -> None:
    class Rotating(Shuffled):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([(index + self.epoch) % self.length for index in range(self.length)])

    source = prepare_loader(DataLoader(Numbers(4), 4, sampler=Rotating(4)), training=True)
    first = [next(source.epoch(epoch))[0].tolist() for epoch in (0, 1, 3)]
    assert first == [[0, 1, 2, 3], [1, 2, 3, 0], [3, 0, 1, 2]]


def test_use_distributed_sampler_false_leaves_the_loader_alone() -> None:
    plain = DataLoader(Numbers(20), 3, shuffle=True, generator=torch.Generator().manual_seed(1))
    expected = [batch.tolist() for batch in plain]
    plain.generator.manual_seed(1)
    source = prepare_loader(plain, training=True, replace_sampler=False)
    pairs = list(source.epoch(0))
    assert [batch.tolist() for batch, _ in pairs] == expected
    assert [shard.samples for _, shard in pairs] == [3] * 6 + [2]
    assert (source.shards_known, source.length) == (True, 7)
    several = prepare_loader(plain, training=True, rank=1, world_size=2, replace_sampler=False)
    assert (several.shards_known, several.length) == (False, 7)
    assert {shard.total for _, shard in several.epoch(0)} == {None}


# Prediction


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_prediction_keeps_the_order_of_the_data_set(world_size: int) -> None:
    # B-04: no duplicates, all samples, in the order that the shards specify.
    for length in (3, 4, 17, 65, 102):
        loader = lambda n=length: DataLoader(Numbers(n), 8, shuffle=True, drop_last=True)  # noqa: E731
        found = steps(sources(loader, world_size, training=False, predicting=True))
        outputs = [(shard.start, batch) for step in found for batch, shard in step if not shard.joins]
        assert [index for _, batch in sorted(outputs) for index in batch] == list(range(length))


# Data sets that hold batches


def test_a_data_set_that_is_read_in_bulk() -> None:
    class Bulk(Numbers):
        def __getitem__(self, index: Any) -> Any:
            assert type(index) is list
            return torch.tensor(index)

    def loader(workers: int = 0) -> DataLoader[int]:
        sampler: Any = BatchSampler(RandomSampler(range(50)), 4, False)
        return DataLoader(Bulk(50), batch_size=None, sampler=sampler, num_workers=workers)

    expected = steps(sources(lambda: DataLoader(Numbers(50), 4, shuffle=True), 2))
    assert steps(sources(loader, 2)) == expected
    ranks = sources(lambda: loader(1), 2)
    assert steps(ranks) == expected
    for source in ranks:
        source.close()


def test_a_data_set_of_batches_is_divided_by_batches() -> None:
    batches: Any = [torch.full((index + 1,), index) for index in range(7)]
    parts = []
    for rank in range(3):
        loader = DataLoader(batches, batch_size=None, shuffle=True)
        source = prepare_loader(loader, training=True, rank=rank, world_size=3)
        pairs = list(source.epoch(0))
        assert (len(pairs), source.length, source.shards_known) == (3, 3, False)
        assert [shard.samples for _, shard in pairs] == [0 if shard.joins else len(batch) for batch, shard in pairs]
        parts += [int(batch[0]) for batch, shard in pairs if not shard.joins]
    assert sorted(parts) == list(range(7))
