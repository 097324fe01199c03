"""The rest of an epoch is re-sharded for another world size or batch size, sample-exact: F-02."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from drivetrain.data._loaders import prepare_loader
from drivetrain.data._sharding import ShardingOrigin
from drivetrain.errors import ConfigurationError

SAMPLES = 102


def loader(kind: str, batch_size: int) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(SAMPLES))
    if kind == "weighted":
        return DataLoader(data, batch_size, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False))
    if kind == "batches":
        lengths = [list(range(start, min(start + 1 + start % 7, SAMPLES))) for start in _starts()]
        return DataLoader(data, batch_sampler=lengths)
    return DataLoader(data, batch_size, shuffle=kind == "shuffled")


def _starts() -> Iterator[int]:
    start = 0
    while start < SAMPLES:
        yield start
        start += 1 + start % 7


def read(
    kind: str, world_size: int, batch_size: int, start: int, origin: ShardingOrigin, limit: int | None = None
) -> Any:
    """Every rank's batches of epoch 3, by micro-batch: lists of samples without the joiners'."""
    by_rank = []
    for rank in range(world_size):
        source = prepare_loader(loader(kind, batch_size), training=True, rank=rank, world_size=world_size, seed=5)
        pairs = list(source.epoch(3, start, origin))[:limit]
        by_rank.append([[] if shard.joins else batch[0].tolist() for batch, shard in pairs])
    return [list(chain.from_iterable(row)) for row in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("kind", ["sequential", "shuffled", "weighted", "batches"])
@pytest.mark.parametrize(("before", "after"), [((2, 8), (4, 8)), ((4, 4), (1, 8)), ((1, 5), (3, 7)), ((3, 7), (2, 1))])
@pytest.mark.parametrize("done", [1, 3])
def test_the_rest_of_an_epoch_is_read_once(
    kind: str, before: tuple[int, int], after: tuple[int, int], done: int
) -> None:
    whole = [sample for batch in read(kind, 1, 1, 0, ShardingOrigin()) for sample in batch]
    assert sorted(whole) == list(range(SAMPLES))
    seen = [sample for batch in read(kind, *before, 0, ShardingOrigin(), done) for sample in batch]
    origin = ShardingOrigin(len(seen), 11)
    rest = read(kind, *after, 11, origin)
    assert whole[: len(seen)] == seen
    assert [sample for batch in rest for sample in batch] == whole[len(seen) :]  # in the epoch's order
    # After a second stop within that epoch, the run resumes at any micro-batch of the new sharding.
    assert read(kind, *after, 12, origin) == rest[1:]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(8))


@pytest.mark.parametrize(
    "given",
    [
        DataLoader(Stream(), 2),
        [DataLoader(TensorDataset(torch.arange(8)), 2), DataLoader(TensorDataset(torch.arange(8)), 2)],
    ],
    ids=["iterable", "combined"],
)
def test_data_that_cannot_be_sharded_anew_is_refused(given: Any) -> None:
    source = prepare_loader(given, training=True, rank=0, world_size=2)
    with pytest.raises(ConfigurationError, match="another world size"):
        source.epoch(0, 1, ShardingOrigin(4, 1))
