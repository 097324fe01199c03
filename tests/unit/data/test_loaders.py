"""prepare_loader: iterables, subclasses, errors, and the cost of a batch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from benchmarks.calls import count_calls
from drivetrain.data._loaders import prepare_loader
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


def test_an_iterable_data_set_is_each_rank_s_own_part() -> None:
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


def test_on_one_process_nothing_is_left_to_ask() -> None:
    source = prepare_loader(DataLoader(SizedStream(10), 4), training=True)
    assert (source.length, source.shards_known) == (3, True)
    assert [shard for _, shard in source.epoch(0)][-1] == BatchShard(2, 2, False, 8)


def test_any_iterable_of_batches_will_do() -> None:
    batches = [{"x": torch.zeros(3, 2)}, {"x": torch.zeros(1, 2)}]
    source = prepare_loader(batches, training=True)
    assert source.length == 2
    assert [shard.samples for _, shard in source.epoch(0)] == [3, 1]
    assert [shard.samples for _, shard in source.epoch(1, 1)] == [1]


def test_a_batch_without_tensors_counts_as_one_and_says_so() -> None:
    source = prepare_loader([["some text", "more"]], training=True)
    with pytest.warns(UserWarning, match="batch_weight"):
        assert next(source.epoch(0))[1].samples == 1


# What is refused


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(numbers(0), 4),
        DataLoader(numbers(3), 4, drop_last=True),
        DataLoader(SizedStream(0), 4),
        DataLoader(numbers(3), batch_sampler=[]),
        [],
        {"a": []},
    ],
)
def test_an_empty_loader_is_refused(loader: Any) -> None:
    # G-06
    with pytest.raises(ConfigurationError, match=r"no batch|length 0"):
        prepare_loader(loader, training=True)


def test_a_global_batch_that_drop_last_leaves_no_sample_for_is_refused() -> None:
    # G-06: 7 samples make a batch of 4 for one rank, and none for two.
    loader = DataLoader(numbers(7), 4, drop_last=True)
    assert prepare_loader(loader, training=True).length == 1
    with pytest.raises(ConfigurationError, match=r"7 samples, batch_size=4, drop_last=True, 2 ranks"):
        prepare_loader(loader, training=True, world_size=2)


def test_an_iterable_that_turns_out_empty_is_refused() -> None:
    # G-06
    with pytest.raises(ConfigurationError, match="yielded no batch"):
        list(prepare_loader(DataLoader(Stream(0), 4), training=True).epoch(0))


def test_an_iterator_lasts_for_one_epoch() -> None:
    source = prepare_loader(iter([torch.zeros(2)]), training=True)
    assert len(list(source.epoch(0))) == 1
    with pytest.raises(ConfigurationError, match="an iterator can be read only once"):
        list(source.epoch(1))


def test_what_is_no_loader_is_refused() -> None:
    # G-06
    with pytest.raises(ConfigurationError, match="int is not a loader"):
        prepare_loader(3, training=True)
    with pytest.raises(ConfigurationError, match="rank=2"):
        prepare_loader([torch.zeros(1)], training=True, rank=2, world_size=2)


# The user's own loader


class Doubling(DataLoader[Any]):
    """A subclass with another constructor, whose batches are not its collated samples."""

    def __init__(self, length: int, *, secret: str) -> None:
        super().__init__(numbers(length), batch_size=4, shuffle=True)
        self.secret = secret

    def __iter__(self) -> Any:
        return map(self.doubled, super().__iter__())

    def doubled(self, batch: Any) -> Any:
        return batch[0] * 2, self.secret


def test_a_subclass_goes_on_working() -> None:
    loader = Doubling(10, secret="hm")
    found = []
    for rank in (0, 1):
        for (batch, secret), _ in prepare_loader(loader, training=True, rank=rank, world_size=2).epoch(0):
            assert secret == "hm"
            found += batch.tolist()
    assert sorted(found) == [2.0 * index for index in range(10)]


def test_the_user_s_loader_stays_as_it_is() -> None:
    loader = DataLoader(numbers(10), 4, shuffle=True, num_workers=1, persistent_workers=True)
    before = dict(vars(loader))
    source = prepare_loader(loader, training=True, world_size=2)
    list(source.epoch(0))
    source.close()
    assert vars(loader) == before
    assert len(list(loader)) == 3
    loader._iterator = None  # lets its workers go


class Losing(DataLoader[Any]):
    def __iter__(self) -> Any:
        return itertools.islice(super().__iter__(), 2)


class Doubled(DataLoader[Any]):
    def __iter__(self) -> Any:
        batches = list(super().__iter__())
        return iter(batches + batches)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("kind", "samples"), [(Losing, [2, 2]), (Doubled, [2, 2, 2, 2, 1] * 2)])
def test_a_loader_that_gives_more_or_fewer_than_it_is_asked_for_is_gone_through(
    kind: type, samples: list[int], shuffled: bool
) -> None:
    # I-04
    sampler = WeightedRandomSampler([1.0] * 9, 9) if shuffled else None
    source = prepare_loader(kind(numbers(9), 2, sampler=sampler), training=True)
    pairs = list(source.epoch(0))
    assert [shard.samples for _, shard in pairs] == samples == [len(batch[0]) for batch, _ in pairs]
    assert (source.length, source.length_is_exact, source.shards_known) == (5, False, True)


def test_on_several_ranks_its_batches_are_each_rank_s_own() -> None:
    # I-04
    for rank in (0, 1):
        source = prepare_loader(Losing(numbers(9), 2), training=True, rank=rank, world_size=2)
        assert not source.shards_known
        assert [shard.total for _, shard in source.epoch(0)] == [None, None]
        # With torch's own iteration, every rank knows all shards without communication, as before.
        assert prepare_loader(DataLoader(numbers(9), 2), training=True, rank=rank, world_size=2).shards_known


def test_batches_whose_first_dimension_is_no_number_of_samples_count_as_the_sampler_says() -> None:
    # I-04: a batch of graphs begins with all their nodes.
    class Graphs(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (torch.zeros(7 + index, 3) for index, _ in enumerate(super().__iter__()))

    source = prepare_loader(Graphs(numbers(9), 2), training=True)
    assert [shard.samples for _, shard in source.epoch(0)] == [2, 2, 2, 2, 1]


@pytest.mark.parametrize("training", [True, False])
def test_who_joins_asks_for_a_sample_that_is_not_counted(training: bool) -> None:
    # I-04, B-04: a loader with custom iteration that yields what its sampler requests.
    class Faithful(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter(list(super().__iter__()))

    for world_size, samples in ((2, 9), (3, 7)):
        counted = 0
        for rank in range(world_size):
            options: dict[str, Any] = {"training": training, "rank": rank, "world_size": world_size}
            own = list(prepare_loader(Faithful(numbers(samples), 2), **options).epoch(0))
            plain = list(prepare_loader(DataLoader(numbers(samples), 2), **options).epoch(0))
            assert [(shard.samples, shard.joins, shard.start) for _, shard in own] == [
                (shard.samples, shard.joins, shard.start) for _, shard in plain
            ]
            counted += sum(shard.samples for _, shard in own)
        assert counted == samples


def test_an_epoch_may_be_left_early_and_begun_again() -> None:
    source = prepare_loader(DataLoader(numbers(10), 2, shuffle=True), training=True)
    first = source.epoch(0)
    taken = next(first)[0][0].tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert next(source.epoch(0))[0][0].tolist() == taken
        assert len(list(first)) == 4


# H-01: what a batch costs


def calls_a_batch(batches: Iterator[Any], count: int = 300) -> float:
    for _ in range(3):
        next(batches)

    def consume() -> None:
        for _ in itertools.islice(batches, count):
            pass

    return (count_calls(consume) - 1) / count  # without the call of `consume`


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"shuffle": True}, 0),
        ({"shuffle": False}, 0),
        ({"sampler": WeightedRandomSampler([1.0] * 3200, 3200)}, 5),
        ({"batch_sampler": [list(range(start, start + 8)) for start in range(0, 3200, 8)]}, 8),
    ],
)
def test_a_batch_costs_next_to_nothing_above_the_raw_loader(options: dict[str, Any], allowed: int) -> None:
    # H-01
    def loader() -> DataLoader[Any]:
        batch_size: dict[str, Any] = {} if "batch_sampler" in options else {"batch_size": 8}
        return DataLoader(numbers(3200), **batch_size, **options)

    raw = calls_a_batch(iter(loader()))
    assert calls_a_batch(prepare_loader(loader(), training=True).epoch(0)) - raw <= allowed


def test_nor_does_it_on_several_ranks() -> None:
    # H-01
    raw = calls_a_batch(iter(DataLoader(numbers(3200), 8, shuffle=True)), 150)
    source = prepare_loader(DataLoader(numbers(3200), 8, shuffle=True), training=True, rank=1, world_size=2)
    assert calls_a_batch(source.epoch(0), 150) <= raw


def test_a_batch_of_an_iterable_data_set_costs_five_calls() -> None:
    # H-01
    raw = calls_a_batch(iter(DataLoader(Stream(3200), 8)))
    assert calls_a_batch(prepare_loader(DataLoader(Stream(3200), 8), training=True).epoch(0)) - raw <= 5
