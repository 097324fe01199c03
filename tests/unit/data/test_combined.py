"""Several loaders at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain.data import CombinedLoader
from drivetrain.data._loaders import prepare_loader
from drivetrain.errors import ConfigurationError
from wrong_lengths import Batches


def loader(length: int, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(length)), 2, shuffle=shuffle)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([[torch.tensor(index)] for index in range(6)])


def plain(batch: Any) -> Any:
    return {key: None if value is None else value[0].tolist() for key, value in batch.items()}


def loaders() -> dict[str, Any]:
    return {"a": loader(4), "b": loader(6)}


EXPECTED: dict[str, list[dict[str, Any]]] = {
    "min_size": [{"a": [0, 1], "b": [0, 1]}, {"a": [2, 3], "b": [2, 3]}],
    "max_size": [{"a": [0, 1], "b": [0, 1]}, {"a": [2, 3], "b": [2, 3]}, {"a": None, "b": [4, 5]}],
    "max_size_cycle": [{"a": [0, 1], "b": [0, 1]}, {"a": [2, 3], "b": [2, 3]}, {"a": [0, 1], "b": [4, 5]}],
}


@pytest.mark.parametrize("mode", list(EXPECTED))
@pytest.mark.parametrize("known", [True, False])
def test_modes(mode: str, known: bool) -> None:
    second = loader(6) if known else DataLoader(Stream(), 2)
    source = prepare_loader(CombinedLoader({"a": loader(4), "b": second}, mode), training=True)
    for start in range(len(EXPECTED[mode]) + 1):
        assert [plain(batch) for batch, _ in source.epoch(0, start)] == EXPECTED[mode][start:]
    assert source.length == (len(EXPECTED[mode]) if known else None)


def test_sequential() -> None:
    for second in (loader(6), DataLoader(Stream(), 2)):
        source = prepare_loader(CombinedLoader([second, loader(4)], "sequential"), training=True)
        every = [batch[0].tolist() for batch, _ in source.epoch(0)]
        assert every == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
        for start in range(6):
            assert [batch[0].tolist() for batch, _ in source.epoch(0, start)] == every[start:]


def test_bare_collections() -> None:
    training = prepare_loader(loaders(), training=True)
    assert [plain(batch) for batch, _ in training.epoch(0)] == EXPECTED["max_size_cycle"]
    evaluation = prepare_loader([loader(4), loader(6)], training=False)
    assert evaluation.length == 5


def test_the_first_loader_s_samples_count() -> None:
    ranks = [prepare_loader([loader(5), loader(9)], training=True, rank=rank, world_size=2) for rank in (0, 1)]
    shards = [[shard for _, shard in source.epoch(0)] for source in ranks]
    assert [[(shard.samples, shard.total, shard.joins) for shard in rank] for rank in shards] == [
        [(2, 4, False), (1, 1, False), (2, 4, False)],
        [(2, 4, False), (0, 1, True), (2, 4, False)],
    ]
    # Once the first is through, the next that has a batch counts.
    source = prepare_loader(CombinedLoader([loader(2), loader(5)], "max_size"), training=True)
    assert [shard.total for _, shard in source.epoch(0)] == [2, 2, 1]


def test_a_loader_that_starts_again_is_shuffled_again() -> None:
    source = prepare_loader([loader(8, shuffle=True), loader(24)], training=True)
    passes = []
    for epoch in (0, 1):
        seen = [index for (first, _), _ in source.epoch(epoch) for index in first[0].tolist()]
        passes += [tuple(seen[start : start + 8]) for start in (0, 8, 16)]
    assert all(sorted(one) == list(range(8)) for one in passes)
    assert len(set(passes)) == 6


def test_two_loaders_are_not_shuffled_alike() -> None:
    source = prepare_loader([loader(32, shuffle=True), loader(32, shuffle=True)], training=True)
    assert any(first[0].tolist() != second[0].tolist() for (first, second), _ in source.epoch(0))


def test_structure_is_kept() -> None:
    nested = {"x": [loader(4), loader(4)], "y": {"z": loader(4)}, "w": CombinedLoader([loader(4)])}
    batch, _ = next(prepare_loader(nested, training=True).epoch(0))
    assert set(batch) == {"x", "y", "w"}
    assert isinstance(batch["x"], list)
    assert batch["y"]["z"][0].tolist() == [0, 1]
    assert batch["w"][0][0].tolist() == [0, 1]
    pair, _ = next(prepare_loader((loader(4), loader(4)), training=True).epoch(0))
    assert isinstance(pair, tuple)


def test_by_itself_it_iterates_as_lightning_s() -> None:
    combined = CombinedLoader(loaders(), "max_size_cycle")
    assert len(combined) == 3
    assert [(plain(batch), number, index) for batch, number, index in combined] == [
        (batch, number, 0) for number, batch in enumerate(EXPECTED["max_size_cycle"])
    ]
    sequential = CombinedLoader([loader(2), loader(4)], "sequential")
    assert [(number, index) for _, number, index in sequential] == [(0, 0), (0, 1), (1, 1)]
    with pytest.raises(TypeError):
        len(CombinedLoader([DataLoader(Stream(), 2)]))


def test_refusals() -> None:
    # G-06
    with pytest.raises(ConfigurationError, match="Did you mean 'max_size_cycle'"):
        CombinedLoader(loaders(), "max_size_cicle")
    with pytest.raises(ConfigurationError, match="contains no loader"):
        prepare_loader({}, training=True)


def wrong(batches: int, said: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(2 * batches)), batch_sampler=Batches(2 * batches, said))


@pytest.mark.parametrize("mode", [*EXPECTED, "sequential"])
@pytest.mark.parametrize("said", [(1, 2), (1, 9), (9, 1), (7, 8)])
def test_a_length_that_is_wrong_cuts_nothing_and_a_resumed_epoch_goes_on_where_it_was(
    mode: str, said: tuple[int, int]
) -> None:
    # I-04
    def numbers(start: int, *lengths: int) -> list[Any]:
        parts = CombinedLoader([wrong(2, lengths[0]), wrong(3, lengths[1])], mode)
        return [
            plain({"batch": batch})
            if mode == "sequential"
            else [None if one is None else one[0].tolist() for one in batch]
            for batch, _ in prepare_loader(parts, training=True).epoch(0, start)
        ]

    right = numbers(0, 2, 3)
    assert len(right) == {"min_size": 2, "sequential": 5}.get(mode, 3)
    for start in range(len(right) + 1):
        assert numbers(start, *said) == right[start:]
    by_itself = CombinedLoader([wrong(2, said[0]), wrong(3, said[1])], mode)
    assert len(list(by_itself)) == len(right)


def test_nobody_starts_again_for_nothing() -> None:
    # I-04: where the longest is through, what was shorter is not begun once more.
    started: list[str] = []

    class Starting(IterableDataset[Any]):
        def __init__(self, name: str, length: int) -> None:
            self.name, self.length = name, length

        def __iter__(self) -> Iterator[Any]:
            started.append(self.name)
            return iter(torch.arange(self.length))

    parts = [DataLoader(Starting("a", 4), 2), DataLoader(Starting("b", 4), 2)]
    assert len(list(prepare_loader(CombinedLoader(parts, "max_size_cycle"), training=True).epoch(0))) == 2
    assert started == ["a", "b"]
