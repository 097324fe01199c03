"""Ranks that use different orders, or read the same data where each should have its own part. Row I-08."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import torch
from small_runs import Regression, data, failing, quiet
from torch.utils.data import DataLoader, IterableDataset, Sampler, random_split

from captured_warnings import captured_warnings
from drivetrain.data import split_by_rank
from worlds import on_ranks


class Shuffled(Sampler[int]):
    """Shuffles with a generator of its own."""

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.random = random.Random(seed)

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        self.random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self.length


class Lines(IterableDataset[Any]):
    """The data set as a stream that every rank reads completely."""

    def __iter__(self) -> Iterator[Any]:
        return iter(data(24))


class Recording(Regression):
    """Records the first number of every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[float]] = {"train": [], "validate": []}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen["train"] += batch[0][:, 0].tolist()
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["validate"] += batch[0][:, 0].tolist()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0][:, 0]


def _shuffling(seed: int) -> DataLoader[Any]:
    return DataLoader(data(24), batch_size=3, sampler=Shuffled(24, seed))


def _runs() -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {}
    with failing() as found["training"]:
        module = Recording()
        quiet(strategy="ddp").fit(module, _shuffling(rank))
    found["trained on before that"] = len(module.seen["train"])
    with failing() as found["weighed"]:
        quiet(strategy="ddp", accumulate_grad_batches=2).fit(Recording(), {"a": _shuffling(0), "b": _shuffling(rank)})
    with failing() as found["validation"]:
        quiet(strategy="ddp").fit(Recording(), _shuffling(0), _shuffling(rank))
    part, _ = random_split(data(32), [24, 8], torch.Generator().manual_seed(rank))
    with failing() as found["split"]:
        quiet(strategy="ddp").fit(Recording(), DataLoader(part, batch_size=3, shuffle=True))
    with captured_warnings() as found["alike, said"]:
        alike = Recording()
        quiet(strategy="ddp", max_epochs=2).fit(alike, _shuffling(5), _shuffling(6))
        found["alike"] = alike.seen
        quiet(strategy="ddp", use_distributed_sampler=False, limit_val_batches=0).fit(Recording(), _shuffling(rank))
    with captured_warnings() as found["whole, said"]:
        loader = DataLoader(Lines(), batch_size=4)
        quiet(strategy="ddp", max_epochs=2).fit(Recording(), loader, loader)
    with captured_warnings() as found["split, said"]:
        module = Recording()
        loaders = [DataLoader(split_by_rank(Lines()), batch_size=4, num_workers=workers) for workers in (2, 0)]
        quiet(strategy="ddp").fit(module, loaders[0], loaders[1])
        found["parts"] = module.seen
        found["predicted"] = torch.cat(quiet(strategy="ddp").predict(module, loaders[1])).tolist()
    return found


def test_ranks_that_wrongly_read_the_same_data_are_warned() -> None:  # I-08
    ranks = on_ranks(_runs, 2, process_group=None)
    numbers = sorted(data(24).tensors[0][:, 0].tolist())
    for found in ranks:
        for name, whose in (("training", "training"), ("weighed", "training"), ("validation", "validation")):
            error = found[name]
            assert error["type"] == "ConfigurationError", (name, error)
            for part in (f"the order of Shuffled, the sampler of the {whose} loader", "rank(s) [0]; ", "rank(s) [1]"):
                assert part in error["text"], (name, error)
        assert found["trained on before that"] == 0
        assert found["split"]["type"] == "DistributedError", found["split"]
        assert "training subset" in found["split"]["text"]
        assert found["alike, said"] == []
        assert found["split, said"] == []
        assert sorted(found["predicted"]) == numbers
    for name, stage, epochs in (("alike", "train", 2), ("alike", "validate", 2), ("parts", "train", 1)):
        seen = [number for found in ranks for number in found[name][stage]]
        assert sorted(seen) == sorted(numbers * epochs), (name, stage)
    said, silent = (found["whole, said"] for found in ranks)
    assert silent == []
    assert len(said) == 2  # once for each loader, whatever the number of epochs
    for line, whose in zip(said, ("training", "validation"), strict=True):
        assert line.startswith(f"The first batch of the {whose} loader is the same on all ranks.")
        assert "split_by_rank(Lines(...))" in line
