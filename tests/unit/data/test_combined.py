"""Several loaders at once; `tests/unit/engine/test_data_forms.py` has runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain.data import CombinedLoader
from drivetrain.data._loaders import prepare_loader  # private: ranks and starts are chosen here without runs
from drivetrain.errors import ConfigurationError
from wrong_lengths import Batches


def loader(length: int, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(length)), 2, shuffle=shuffle)


class Stream(IterableDataset[Any]):
    """An iterable that notes when it is started."""

    def __init__(self, length: int = 6) -> None:
        self.length, self.started = length, 0

    def __iter__(self) -> Iterator[Any]:
        self.started += 1
        return iter([[torch.tensor(index)] for index in range(self.length)])


def plain(batch: Any) -> Any:
    return {key: None if value is None else value[0].tolist() for key, value in batch.items()}


EXPECTED: dict[str, list[dict[str, Any]]] = {
    "min_size": [{"a": [0, 1], "b": [0, 1]}, {"a": [2, 3], "b": [2, 3]}],
    "max_size": [{"a": [0, 1], "b": [0, 1]}, {"a": [2, 3], "b": [2, 3]}, {"a": None, "b": [4, 5]}],
    "max_size_cycle": [{"a": [0, 1], "b": [0, 1]}, {"a": [2, 3], "b": [2, 3]}, {"a": [0, 1], "b": [4, 5]}],
}


@pytest.mark.parametrize("mode", list(EXPECTED))
@pytest.mark.parametrize("known", [True, False])
def test_an_epoch_starts_at_any_batch(mode: str, known: bool) -> None:
    second = loader(6) if known else DataLoader(Stream(), 2)
    source = prepare_loader(CombinedLoader({"a": loader(4), "b": second}, mode), training=True)
    for start in range(len(EXPECTED[mode]) + 1):
        assert [plain(batch) for batch, _ in source.epoch(0, start)] == EXPECTED[mode][start:]
    assert source.length == (len(EXPECTED[mode]) if known else None)


def test_a_sequence_starts_at_any_batch() -> None:
    for second in (loader(6), DataLoader(Stream(), 2)):
        source = prepare_loader(CombinedLoader([second, loader(4)], "sequential"), training=True)
        every = [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
        for start in range(6):
            assert [batch[0].tolist() for batch, _ in source.epoch(0, start)] == every[start:]
    assert prepare_loader([loader(4), loader(6)], training=False).length == 5


def test_the_samples_of_the_first_loader_are_counted() -> None:
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
        seen = [index for (first, _), _ in source.epoch(epoch) for index in first[0].tolist()]
        passes += [tuple(seen[start : start + 8]) for start in (0, 8, 16)]
    assert all(sorted(one) == list(range(8)) for one in passes)
    assert len(set(passes)) == 6
    source = prepare_loader([loader(32, shuffle=True), loader(32, shuffle=True)], training=True)
    assert any(first[0].tolist() != second[0].tolist() for (first, second), _ in source.epoch(0))


def test_it_iterates_outside_a_run_as_in_lightning() -> None:
    combined = CombinedLoader({"a": loader(4), "b": loader(6)}, "max_size_cycle")
    assert len(combined) == 3
    assert [(plain(batch), number, index) for batch, number, index in combined] == [
        (batch, number, 0) for number, batch in enumerate(EXPECTED["max_size_cycle"])
    ]
    sequential = CombinedLoader([loader(2), loader(4)], "sequential")
    assert [(number, index) for _, number, index in sequential] == [(0, 0), (0, 1), (1, 1)]
    with pytest.raises(TypeError):
        len(CombinedLoader([DataLoader(Stream(), 2)]))


def test_a_wrong_mode_and_an_empty_collection_are_refused() -> None:
    # G-06
    with pytest.raises(ConfigurationError, match="Did you mean 'max_size_cycle'"):
        CombinedLoader([loader(4)], "max_size_cicle")
    with pytest.raises(ConfigurationError, match="contains no loader"):
        prepare_loader({}, training=True)


def with_length(batches: int, length: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(2 * batches)), batch_sampler=Batches(2 * batches, length))


@pytest.mark.parametrize("mode", [*EXPECTED, "sequential"])
@pytest.mark.parametrize("wrong", [(1, 2), (1, 9), (9, 1), (7, 8)])
def test_wrong_lengths_lose_no_batch_of_an_epoch_or_a_resumed_one(mode: str, wrong: tuple[int, int]) -> None:
    # I-04
    def combined(lengths: tuple[int, int]) -> CombinedLoader:
        return CombinedLoader([with_length(2, lengths[0]), with_length(3, lengths[1])], mode)

    def batches(start: int, lengths: tuple[int, int]) -> list[Any]:
        return [str(batch) for batch, _ in prepare_loader(combined(lengths), training=True).epoch(0, start)]

    right = batches(0, (2, 3))
    assert len(right) == {"min_size": 2, "sequential": 5}.get(mode, 3)
    for start in range(len(right) + 1):
        assert batches(start, wrong) == right[start:]
    assert len(list(combined(wrong))) == len(right)


def test_a_loader_is_not_started_again_at_the_end_of_the_longest() -> None:
    # I-04
    streams = [Stream(4), Stream(4)]
    parts = [DataLoader(stream, 2) for stream in streams]
    assert len(list(prepare_loader(CombinedLoader(parts, "max_size_cycle"), training=True).epoch(0))) == 2
    assert [stream.started for stream in streams] == [1, 1]
