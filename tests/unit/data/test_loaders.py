"""prepare_loader: iterables, subclasses, several loaders at once, errors, and the cost of a batch.

Iterables are split by rank and worker, and ranks that read the same data are detected (I-08).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from benchmarks.calls import count_calls
from drivetrain._data.loaders import prepare_loader  # private: ranks are simulated, and calls counted, without runs
from drivetrain._data.order_fingerprint import digest_of_batch, digest_of_indices, subset_fingerprint
from drivetrain._data.sharding import BatchShare, EpochOffset
from drivetrain._data.splitting import use_data_rank
from drivetrain.data import CombinedLoader, split_by_rank
from drivetrain.errors import ConfigurationError
from wrong_lengths import Batches

NO_BATCH = r"no batch|length 0"
IN_BATCHES = [list(range(start, start + 8)) for start in range(0, 3200, 8)]


def numbers(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length, dtype=torch.float32))


def loader(length: int, batch_size: int = 2, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(numbers(length), batch_size, shuffle=shuffle)


class Stream(IterableDataset[Any]):
    """An iterable that notes its epochs and how often it is started."""

    def __init__(self, length: int) -> None:
        self.length, self.started = length, 0
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        self.started += 1
        return iter(torch.arange(self.length))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.length


def plain(batch: Any) -> Any:
    """Return the samples of a batch, or of each part of a combined one."""
    if isinstance(batch, dict):
        return {key: None if part is None else plain(part) for key, part in batch.items()}
    return (batch if isinstance(batch, torch.Tensor) else batch[0]).tolist()


def test_an_iterable_data_set_is_each_ranks_own_part() -> None:
    stream = Stream(10)
    source = prepare_loader(DataLoader(stream, 4), training=True, rank=1, world_size=2)
    assert (source.length, source.shares_known) == (None, False)
    pairs = [(plain(batch), shard) for batch, shard in source.epoch(3)]
    assert pairs == [
        ([0, 1, 2, 3], BatchShare(4, None, False, 0)),
        ([4, 5, 6, 7], BatchShare(4, None, False, 4)),
        ([8, 9], BatchShare(2, None, False, 8)),
    ]
    assert stream.epochs == [3]
    assert [(plain(batch), shard) for batch, shard in source.epoch(4, 2)] == pairs[2:]
    alone = prepare_loader(DataLoader(SizedStream(10), 4), training=True)
    assert (alone.length, alone.shares_known) == (3, True)
    assert [shard for _, shard in alone.epoch(0)][-1] == BatchShare(2, 2, False, 8)


def test_an_iterable_of_batches() -> None:
    batches = [{"x": torch.zeros(3, 2)}, {"x": torch.zeros(1, 2)}]
    source = prepare_loader(batches, training=True)
    assert source.length == 2
    assert [shard.samples for _, shard in source.epoch(0)] == [3, 1]
    assert [shard.samples for _, shard in source.epoch(1, 1)] == [1]
    text = prepare_loader([["some text", "more"]], training=True)
    with pytest.warns(UserWarning, match="batch_weight"):
        assert next(text.epoch(0))[1].samples == 1


WITHOUT_BATCHES: dict[str, tuple[Any, str]] = {
    "no sample": (loader(0, 4), NO_BATCH),
    # a batch of 4 for one rank, and none for two
    "drop_last": (DataLoader(numbers(7), 4, drop_last=True), "no batch of its 7 samples"),
    "empty stream": (DataLoader(SizedStream(0), 4), NO_BATCH),
    "batch sampler": (DataLoader(numbers(3), batch_sampler=[]), NO_BATCH),
    "list": ([], NO_BATCH),
    "dict": ({"a": []}, NO_BATCH),
    "no loader": ({}, "contains no loader"),
}


@pytest.mark.parametrize(("given", "message"), WITHOUT_BATCHES.values(), ids=WITHOUT_BATCHES)
def test_what_yields_no_batch_is_refused(given: Any, message: str) -> None:  # G-06
    with pytest.raises(ConfigurationError, match=message):
        prepare_loader(given, training=True, world_size=2)


def test_iterables_that_yield_no_batch_are_refused_when_they_are_read() -> None:  # G-06
    with pytest.raises(ConfigurationError, match="yielded no batch"):
        list(prepare_loader(DataLoader(Stream(0), 4), training=True).epoch(0))
    source = prepare_loader(iter([torch.zeros(2)]), training=True)
    assert len(list(source.epoch(0))) == 1
    with pytest.raises(ConfigurationError, match="an iterator can be read only once"):
        list(source.epoch(1))


class Doubling(DataLoader[Any]):
    """A subclass with another constructor, whose batches are not its collated samples."""

    def __init__(self, length: int, *, text: str) -> None:
        super().__init__(numbers(length), batch_size=4, shuffle=True)
        self.text = text

    def __iter__(self) -> Any:
        return ((batch[0] * 2, self.text) for batch in super().__iter__())


def yielding(change: Callable[[list[Any]], list[Any]]) -> type[DataLoader[Any]]:
    """Return a subclass whose ``__iter__`` changes the batches."""
    return type("Custom", (DataLoader,), {"__iter__": lambda self: iter(change(list(DataLoader.__iter__(self))))})


FEWER, MORE, EQUAL = yielding(lambda batches: batches[:2]), yielding(lambda batches: batches * 2), yielding(list)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("kind", "samples"), [(FEWER, [2, 2]), (MORE, [2, 2, 2, 2, 1] * 2)])
def test_all_batches_of_a_subclass_are_read_and_counted(kind: type, samples: list[int], shuffled: bool) -> None:  # I-04
    sampler = WeightedRandomSampler([1.0] * 9, 9) if shuffled else None
    source = prepare_loader(kind(numbers(9), 2, sampler=sampler), training=True)
    assert [shard.samples for _, shard in source.epoch(0)] == samples
    assert (source.length, source.length_is_exact, source.shares_known) == (5, False, True)


def test_a_subclass_on_several_ranks_yields_each_ranks_own_batches() -> None:  # I-04
    doubled = []
    for rank in (0, 1):
        source = prepare_loader(FEWER(numbers(9), 2), training=True, rank=rank, world_size=2)
        assert not source.shares_known
        assert [shard.total for _, shard in source.epoch(0)] == [None, None]
        # With torch's own iteration, every rank knows all shards without communication.
        assert prepare_loader(loader(9), training=True, rank=rank, world_size=2).shares_known
        source = prepare_loader(Doubling(10, text="hm"), training=True, rank=rank, world_size=2)
        for (batch, text), _ in source.epoch(0):
            assert text == "hm"
            doubled += batch.tolist()
    assert sorted(doubled) == [2.0 * index for index in range(10)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("world_size", "samples"), [(2, 9), (3, 7)])
def test_the_sample_of_a_joining_rank_is_not_counted(training: bool, world_size: int, samples: int) -> None:
    # I-04, B-04: a loader with custom iteration that yields what its sampler requests.
    counted = 0
    for rank in range(world_size):
        found = []
        for kind in (EQUAL, DataLoader):
            source = prepare_loader(kind(numbers(samples), 2), training=training, rank=rank, world_size=world_size)
            found.append([(shard.samples, shard.joins, shard.start) for _, shard in source.epoch(0)])
        assert found[0] == found[1]
        counted += sum(count for count, _, _ in found[0])
    assert counted == samples


COMBINED: dict[str, list[Any]] = {
    "min_size": [{"a": [0, 1], "b": [0, 1]}, {"a": [2, 3], "b": [2, 3]}],
    "max_size": [{"a": [0, 1], "b": [0, 1]}, {"a": [2, 3], "b": [2, 3]}, {"a": None, "b": [4, 5]}],
    "max_size_cycle": [{"a": [0, 1], "b": [0, 1]}, {"a": [2, 3], "b": [2, 3]}, {"a": [0, 1], "b": [4, 5]}],
    "sequential": [[0, 1], [2, 3], [0, 1], [2, 3], [4, 5]],
}


@pytest.mark.parametrize("mode", COMBINED)
@pytest.mark.parametrize("known", [True, False])
def test_an_epoch_of_several_loaders_starts_at_any_batch(mode: str, known: bool) -> None:
    second = loader(6) if known else DataLoader(Stream(6), 2)
    source = prepare_loader(CombinedLoader({"a": loader(4), "b": second}, mode), training=True)
    for start in range(len(COMBINED[mode]) + 1):
        assert [plain(batch) for batch, _ in source.epoch(0, start)] == COMBINED[mode][start:]
    assert source.length == (len(COMBINED[mode]) if known else None)


def test_the_samples_of_the_first_of_several_loaders_are_counted() -> None:
    ranks = [prepare_loader([loader(5), loader(9)], training=True, rank=rank, world_size=2) for rank in (0, 1)]
    shards = [[shard for _, shard in source.epoch(0)] for source in ranks]
    assert [[(shard.samples, shard.total, shard.joins) for shard in rank] for rank in shards] == [
        [(2, 4, False), (1, 1, False), (2, 4, False)],
        [(2, 4, False), (0, 1, True), (2, 4, False)],
    ]
    # Once the first is through, the next that has a batch counts.
    source = prepare_loader(CombinedLoader([loader(2), loader(5)], "max_size"), training=True)
    assert [shard.total for _, shard in source.epoch(0)] == [2, 2, 1]


def test_loaders_and_their_repetitions_are_shuffled_differently() -> None:
    source = prepare_loader([loader(8, shuffle=True), loader(24)], training=True)
    passes = []
    for epoch in (0, 1):
        seen = [index for (first, _), _ in source.epoch(epoch) for index in plain(first)]
        passes += [tuple(seen[start : start + 8]) for start in (0, 8, 16)]
    assert all(sorted(one) == list(range(8)) for one in passes)
    assert len(set(passes)) == 6
    source = prepare_loader([loader(32, shuffle=True), loader(32, shuffle=True)], training=True)
    assert any(plain(first) != plain(second) for (first, second), _ in source.epoch(0))


def test_a_combined_loader_iterates_outside_a_run_as_in_lightning() -> None:
    combined = CombinedLoader({"a": loader(4), "b": loader(6)}, "max_size_cycle")
    assert len(combined) == 3
    assert [(plain(batch), number, index) for batch, number, index in combined] == [
        (batch, number, 0) for number, batch in enumerate(COMBINED["max_size_cycle"])
    ]
    sequential = CombinedLoader([loader(2), loader(4)], "sequential")
    assert [(number, index) for _, number, index in sequential] == [(0, 0), (0, 1), (1, 1)]
    assert prepare_loader([loader(4), loader(6)], training=False).length == 5  # as evaluations read several loaders
    with pytest.raises(TypeError):
        len(CombinedLoader([DataLoader(Stream(6), 2)]))
    with pytest.raises(ConfigurationError, match="Did you mean 'max_size_cycle'"):  # G-06
        CombinedLoader([loader(4)], "max_size_cicle")


@pytest.mark.parametrize("mode", COMBINED)
@pytest.mark.parametrize("wrong", [(1, 2), (1, 9), (9, 1), (7, 8)])
def test_wrong_lengths_lose_no_batch_of_an_epoch_or_a_resumed_one(mode: str, wrong: tuple[int, int]) -> None:  # I-04
    def combined(lengths: tuple[int, int]) -> CombinedLoader:
        samplers = Batches(4, lengths[0]), Batches(6, lengths[1])
        return CombinedLoader([DataLoader(numbers(one.samples), batch_sampler=one) for one in samplers], mode)

    def batches(start: int, lengths: tuple[int, int]) -> list[Any]:
        return [str(batch) for batch, _ in prepare_loader(combined(lengths), training=True).epoch(0, start)]

    right = batches(0, (2, 3))
    assert len(right) == len(COMBINED[mode])
    for start in range(len(right) + 1):
        assert batches(start, wrong) == right[start:]
    assert len(list(combined(wrong))) == len(right)


def test_a_loader_is_not_started_again_at_the_end_of_the_longest() -> None:  # I-04
    streams = [Stream(4), Stream(4)]
    parts = [DataLoader(stream, 2) for stream in streams]
    assert len(list(prepare_loader(CombinedLoader(parts, "max_size_cycle"), training=True).epoch(0))) == 2
    assert [stream.started for stream in streams] == [1, 1]


@pytest.mark.parametrize("given", [DataLoader(Stream(8), 2), [loader(8), loader(8)]], ids=["iterable", "combined"])
def test_data_that_cannot_be_sharded_anew_is_refused(given: Any) -> None:  # F-02
    source = prepare_loader(given, training=True, rank=0, world_size=2)
    with pytest.raises(ConfigurationError, match="another world size"):
        source.epoch(0, 1, EpochOffset(4, 1))


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
        (numbers(3200), {"batch_size": 8, "shuffle": True}, 1, 0),
        (numbers(3200), {"batch_size": 8}, 1, 0),
        (numbers(3200), {"batch_size": 8, "shuffle": True}, 2, 0),
        (numbers(3200), {"batch_size": 8, "sampler": WeightedRandomSampler([1.0] * 3200, 3200)}, 1, 5),
        (numbers(3200), {"batch_sampler": IN_BATCHES}, 1, 8),
        (Stream(3200), {"batch_size": 8}, 1, 5),
    ],
    ids=["shuffled", "sequential", "several ranks", "sampler", "batch sampler", "iterable"],
)
def test_a_batch_costs_few_calls(data: Any, options: dict[str, Any], world_size: int, allowed: int) -> None:  # H-01
    plain = calls_a_batch(iter(DataLoader(data, **options)))
    source = prepare_loader(DataLoader(data, **options), training=True, rank=world_size - 1, world_size=world_size)
    assert calls_a_batch(source.epoch(0)) - plain <= allowed


class SplitsByWorker(Stream):
    """Splits itself by worker, as torch's documentation shows."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, self.length, step))


class Mapped(Dataset[int]):
    """A map-style data set that skips what another worker reads."""

    def __getitem__(self, index: int) -> int:
        if index >= 12:
            raise IndexError(index)
        worker = get_worker_info()
        return index if worker is None else index * worker.num_workers + worker.id


class Chained(IterableDataset[int]):
    """Splits what it reads, within its own ``__iter__``; one of the parts splits itself."""

    def __iter__(self) -> Iterator[int]:
        yield from split_by_rank(range(7))
        yield from (7 + element for element in split_by_rank(SplitsByWorker(10)))


class Reversed(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self))[::-1])


def _read(loader: DataLoader[Any], rank: int, world_size: int) -> list[int]:
    with use_data_rank(lambda: (rank, world_size)):
        source = prepare_loader(loader, training=True, rank=rank, world_size=world_size)
        samples = [int(sample) for batch, _ in source.epoch(0) for sample in batch]
        source.close()
    return samples


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (3, 0), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    ("dataset", "samples"),
    [
        pytest.param(split_by_rank(Stream(23)), 23, id="iterable"),
        pytest.param(split_by_rank(SplitsByWorker(48)), 48, id="splits by worker"),
        pytest.param(split_by_rank(SplitsByWorker(48), by_worker=False), 48, id="by_worker=False"),
        pytest.param(split_by_rank(Mapped()), 12, id="map-style"),  # type: ignore[arg-type]
        pytest.param(split_by_rank(Chained()), 17, id="chained"),
        pytest.param(split_by_rank(split_by_rank(SplitsByWorker(20))), 20, id="twice"),
    ],
)
def test_every_sample_is_read_once(dataset: Any, samples: int, ranks: int, workers: int) -> None:  # I-08, Q-07
    parts = [_read(DataLoader(dataset, batch_size=4, num_workers=workers), rank, ranks) for rank in range(ranks)]
    assert sorted(sample for part in parts for sample in part) == list(range(samples))
    assert all(parts)


def test_spawned_workers_know_their_rank_and_need_not_share_its_part() -> None:  # I-08
    loader = DataLoader(split_by_rank(range(8)), batch_size=2, num_workers=2, multiprocessing_context="spawn")
    assert sorted(_read(loader, 1, 2)) == [1, 3, 5, 7]
    dataset = split_by_rank(range(6), by_worker=False)
    assert _read(DataLoader(dataset, batch_size=3, num_workers=2), 1, 2) == [1, 3, 5] * 2  # each worker reads all


class AroundReads(IterableDataset[bool]):
    """Yields whether a worker knows itself after reads that are under way, abandoned, failed and complete."""

    def __iter__(self) -> Iterator[bool]:
        elements = iter(split_by_rank(SplitsByWorker(8)))
        next(elements)
        yield get_worker_info() is not None
        del elements
        yield get_worker_info() is not None
        with suppress(ZeroDivisionError):
            list(split_by_rank(1 // number for number in (0, 0)))
        yield get_worker_info() is not None
        yield len(list(split_by_rank(SplitsByWorker(8)))) == 4
        yield get_worker_info() is not None


def test_a_worker_knows_itself_again_after_each_read() -> None:
    assert list(DataLoader(AroundReads(), batch_size=None, num_workers=2)) == [True] * 10


def test_outside_a_run_an_iterable_is_not_split() -> None:  # I-08
    stream = Stream(5)
    split = split_by_rank(stream)
    assert list(split) == [0, 1, 2, 3, 4] == list(split)
    with use_data_rank(lambda: (1, 3)):
        assert list(split) == [1, 4]
    assert list(split) == [0, 1, 2, 3, 4]
    split.set_epoch(7)
    assert stream.epochs == [7]
    split_by_rank([1]).set_epoch(3)


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: str = "a"


class Opaque:
    """Has nothing to tell it from others."""


def test_digests_differ_for_other_orders_and_batches() -> None:  # I-08
    assert digest_of_indices([[1, 2], [3]]) == digest_of_indices([(1, torch.tensor(2)), [3]])
    assert digest_of_indices([[1, 2], [3]]) != digest_of_indices([[1], [2, 3]])
    assert digest_of_indices([("a", 1)]) != digest_of_indices([("b", 1)])
    assert digest_of_indices([Opaque()]) == digest_of_indices([Opaque()])  # an address is no index
    zeros, bright = torch.zeros(2, 3, 64, 64), torch.zeros(2, 3, 64, 64)
    bright[1, 2, 40] = 1  # far behind a border that is black in all
    assert digest_of_batch(zeros) == digest_of_batch(zeros.clone())
    assert digest_of_batch({"x": [Record(zeros)], "y": None}) == digest_of_batch({"x": [Record(zeros.clone())]})
    for one, other in (
        (zeros, bright),
        (zeros.numpy(), bright.numpy()),
        (Path("a"), Path("b")),
        ({"x": [Record(zeros)]}, {"x": [Record(zeros, "b")]}),
        ({"x": [Record(zeros.bfloat16())]}, {"x": [Record(zeros.bfloat16() + 1)]}),
        (torch.ones(2).to_sparse(), torch.zeros(3, device="meta")),
    ):
        assert digest_of_batch(one) != digest_of_batch(other)
    for unknown in ([Opaque(), None], [None], {"graph": Opaque(), "task": "nodes"}):  # in which they may differ
        assert digest_of_batch(unknown) is None


def test_fingerprints_of_subsets_differ_and_are_small() -> None:  # I-08
    data = TensorDataset(torch.zeros(100_000))
    assert subset_fingerprint(data) is None
    assert subset_fingerprint(ConcatDataset([data, data])) is None
    first, second = (subset_fingerprint(Subset(data, list(range(start, 90_000)))) for start in (0, 1))
    assert first
    assert first[:3] == [0, 22, 44]
    assert len(first) < 10
    assert first != second


def _names(loader: Any, **options: Any) -> list[str]:
    source = prepare_loader(loader, training=True, world_size=2, **options)
    if not source.needs_order_check:
        return []
    next(iter(source.epoch(0)))
    return [sight.name for sight in source.order_fingerprints()]


def test_orders_are_compared_under_the_name_of_their_sampler() -> None:  # I-08
    data = TensorDataset(torch.zeros(8))
    own = DataLoader(data, batch_size=2, sampler=Reversed(data))
    assert _names(own) == ["Reversed"]
    assert _names(DataLoader(data, batch_sampler=BatchSampler(Reversed(data), 2, False))) == ["Reversed"]
    assert _names(DataLoader(data, sampler=torch.utils.data.SubsetRandomSampler(range(8)))) == ["SubsetRandomSampler"]
    assert _names(DataLoader(data, batch_size=2, shuffle=True)) == []  # the order is ours
    assert _names(own, replace_sampler=False) == []  # and here each rank's own
    stream = DataLoader(Stream(8), batch_size=2)
    assert _names(stream) == ["Stream"]
    assert _names(DataLoader(split_by_rank(Stream(8)), batch_size=2)) == []
    assert _names(CombinedLoader([own, stream])) == ["Reversed", "Stream"]
