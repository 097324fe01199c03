"""prepare_loader: iterables, subclasses, errors, and the cost of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from benchmarks.calls import count_calls
from drivetrain.data._loaders import prepare_loader  # private: ranks are simulated, and calls counted, without runs
from drivetrain.data._sharding import BatchShard
from drivetrain.errors import ConfigurationError


def numbers(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length, dtype=torch.float32))


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.length))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.length


# Iterables


def test_an_iterable_data_set_is_each_ranks_own_part() -> None:
    stream = Stream(10)
    source = prepare_loader(DataLoader(stream, 4), training=True, rank=1, world_size=2)
    assert (source.length, source.shards_known) == (None, False)
    pairs = [(batch.tolist(), shard) for batch, shard in source.epoch(3)]
    assert pairs == [
        ([0, 1, 2, 3], BatchShard(4, None, False, 0)),
        ([4, 5, 6, 7], BatchShard(4, None, False, 4)),
        ([8, 9], BatchShard(2, None, False, 8)),
    ]
    assert stream.epochs == [3]
    assert [(batch.tolist(), shard) for batch, shard in source.epoch(4, 2)] == pairs[2:]
    alone = prepare_loader(DataLoader(SizedStream(10), 4), training=True)
    assert (alone.length, alone.shards_known) == (3, True)
    assert [shard for _, shard in alone.epoch(0)][-1] == BatchShard(2, 2, False, 8)


def test_an_iterable_of_batches() -> None:
    batches = [{"x": torch.zeros(3, 2)}, {"x": torch.zeros(1, 2)}]
    source = prepare_loader(batches, training=True)
    assert source.length == 2
    assert [shard.samples for _, shard in source.epoch(0)] == [3, 1]
    assert [shard.samples for _, shard in source.epoch(1, 1)] == [1]
    text = prepare_loader([["some text", "more"]], training=True)
    with pytest.warns(UserWarning, match="batch_weight"):
        assert next(text.epoch(0))[1].samples == 1


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        pytest.param(DataLoader(numbers(0), 4), r"no batch|length 0", id="no sample"),
        pytest.param(
            DataLoader(numbers(7), 4, drop_last=True),  # a batch of 4 for one rank, and none for two
            r"7 samples, batch_size=4, drop_last=True, 2 ranks",
            id="drop_last",
        ),
        pytest.param(DataLoader(SizedStream(0), 4), r"no batch|length 0", id="empty stream"),
        pytest.param(DataLoader(numbers(3), batch_sampler=[]), r"no batch|length 0", id="batch sampler"),
        pytest.param([], r"no batch|length 0", id="list"),
        pytest.param({"a": []}, r"no batch|length 0", id="dict"),
        pytest.param(3, "int is not a loader", id="number"),
    ],
)
def test_what_yields_no_batch_is_refused(loader: Any, message: str) -> None:
    # G-06
    with pytest.raises(ConfigurationError, match=message):
        prepare_loader(loader, training=True, world_size=2)
    with pytest.raises(ConfigurationError, match="rank=2"):
        prepare_loader([torch.zeros(1)], training=True, rank=2, world_size=2)


def test_iterables_that_yield_no_batch_are_refused_when_they_are_read() -> None:
    # G-06
    with pytest.raises(ConfigurationError, match="yielded no batch"):
        list(prepare_loader(DataLoader(Stream(0), 4), training=True).epoch(0))
    source = prepare_loader(iter([torch.zeros(2)]), training=True)
    assert len(list(source.epoch(0))) == 1
    with pytest.raises(ConfigurationError, match="an iterator can be read only once"):
        list(source.epoch(1))


# Subclasses of DataLoader


class Doubling(DataLoader[Any]):
    """A subclass with another constructor, whose batches are not its collated samples."""

    def __init__(self, length: int, *, text: str) -> None:
        super().__init__(numbers(length), batch_size=4, shuffle=True)
        self.text = text

    def __iter__(self) -> Any:
        return ((batch[0] * 2, self.text) for batch in super().__iter__())


def test_a_subclass_with_another_constructor() -> None:
    loader = Doubling(10, text="hm")
    found = []
    for rank in (0, 1):
        for (batch, text), _ in prepare_loader(loader, training=True, rank=rank, world_size=2).epoch(0):
            assert text == "hm"
            found += batch.tolist()
    assert sorted(found) == [2.0 * index for index in range(10)]


class Fewer(DataLoader[Any]):
    def __iter__(self) -> Any:
        return itertools.islice(super().__iter__(), 2)


class More(DataLoader[Any]):
    def __iter__(self) -> Any:
        batches = list(super().__iter__())
        return iter(batches + batches)


class Equal(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(list(super().__iter__()))


class Graphs(DataLoader[Any]):
    """The first dimension of a batch of graphs is the number of all their nodes."""

    def __iter__(self) -> Any:
        return (torch.zeros(7 + index, 3) for index, _ in enumerate(super().__iter__()))


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("kind", "samples"), [(Fewer, [2, 2]), (More, [2, 2, 2, 2, 1] * 2), (Graphs, [2, 2, 2, 2, 1])])
def test_all_batches_of_a_subclass_are_read_and_counted_as_its_sampler_says(
    kind: type, samples: list[int], shuffled: bool
) -> None:
    # I-04
    sampler = WeightedRandomSampler([1.0] * 9, 9) if shuffled else None
    source = prepare_loader(kind(numbers(9), 2, sampler=sampler), training=True)
    assert [shard.samples for _, shard in source.epoch(0)] == samples
    assert (source.length, source.length_is_exact, source.shards_known) == (5, False, True)


def test_a_subclass_on_several_ranks_yields_each_ranks_own_batches() -> None:
    # I-04
    for rank in (0, 1):
        source = prepare_loader(Fewer(numbers(9), 2), training=True, rank=rank, world_size=2)
        assert not source.shards_known
        assert [shard.total for _, shard in source.epoch(0)] == [None, None]
        # With torch's own iteration, every rank knows all shards without communication.
        assert prepare_loader(DataLoader(numbers(9), 2), training=True, rank=rank, world_size=2).shards_known


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("world_size", "samples"), [(2, 9), (3, 7)])
def test_the_sample_of_a_joining_rank_is_not_counted(training: bool, world_size: int, samples: int) -> None:
    # I-04, B-04: a loader with custom iteration that yields what its sampler requests.
    counted = 0
    for rank in range(world_size):
        options: dict[str, Any] = {"training": training, "rank": rank, "world_size": world_size}
        own, plain = (
            [shard for _, shard in prepare_loader(kind(numbers(samples), 2), **options).epoch(0)]
            for kind in (Equal, DataLoader)
        )
        assert [(one.samples, one.joins, one.start) for one in own] == [
            (one.samples, one.joins, one.start) for one in plain
        ]
        counted += sum(shard.samples for shard in own)
    assert counted == samples


# H-01: what a batch costs


def calls_a_batch(batches: Iterator[Any], count: int = 150) -> float:
    for _ in range(3):
        next(batches)

    def consume() -> None:
        for _ in itertools.islice(batches, count):
            pass

    return (count_calls(consume) - 1) / count  # without the call of `consume`


@pytest.mark.parametrize(
    ("data", "options", "world_size", "allowed"),
    [
        pytest.param(numbers(3200), {"batch_size": 8, "shuffle": True}, 1, 0, id="shuffled"),
        pytest.param(numbers(3200), {"batch_size": 8}, 1, 0, id="sequential"),
        pytest.param(numbers(3200), {"batch_size": 8, "shuffle": True}, 2, 0, id="several ranks"),
        pytest.param(
            numbers(3200), {"batch_size": 8, "sampler": WeightedRandomSampler([1.0] * 3200, 3200)}, 1, 5, id="sampler"
        ),
        pytest.param(
            numbers(3200),
            {"batch_sampler": [list(range(start, start + 8)) for start in range(0, 3200, 8)]},
            1,
            8,
            id="batch sampler",
        ),
        pytest.param(Stream(3200), {"batch_size": 8}, 1, 5, id="iterable"),
    ],
)
def test_a_batch_costs_few_calls_above_the_plain_loader(
    data: Any, options: dict[str, Any], world_size: int, allowed: int
) -> None:
    # H-01
    plain = calls_a_batch(iter(DataLoader(data, **options)))
    source = prepare_loader(DataLoader(data, **options), training=True, rank=world_size - 1, world_size=world_size)
    assert calls_a_batch(source.epoch(0)) - plain <= allowed
