"""Splitting an iterable by rank and worker, and detecting ranks that read the same data. Row I-08."""

from __future__ import annotations

from collections.abc import Iterator
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
    get_worker_info,
)

from drivetrain.data import CombinedLoader, split_by_rank
from drivetrain.data._loaders import prepare_loader
from drivetrain.data._order_fingerprint import digest_of_batch, digest_of_indices, subset_fingerprint
from drivetrain.data.splitting import use_data_rank


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


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
