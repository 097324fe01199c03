"""Ranks that use different orders, or read the same data where each should have its own part. Row I-08."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from typing import Any

import torch
from small_runs import Regression, data, quiet, refusal
from torch.utils.data import DataLoader, IterableDataset, Sampler, random_split

from captured_warnings import captured_warnings
from drivetrain.data import split_by_rank
from worlds import on_ranks


class Shuffled(Sampler[int]):
    """Shuffles with a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(24), 24))

    def __len__(self) -> int:
        return 24


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
    return DataLoader(data(24), batch_size=3, sampler=Shuffled(seed))


def _runs() -> dict[str, Any]:
    rank, module = int(os.environ["RANK"]), Recording()
    found: dict[str, Any] = {"training": refusal(module, _shuffling(rank), strategy="ddp")}
    found["trained on before that"] = len(module.seen["train"])
    weighed = {"a": _shuffling(0), "b": _shuffling(rank)}
    found["weighed"] = refusal(Recording(), weighed, strategy="ddp", accumulate_grad_batches=2)
    found["validation"] = refusal(Recording(), _shuffling(0), _shuffling(rank), strategy="ddp")
    part, _ = random_split(data(32), [24, 8], torch.Generator().manual_seed(rank))
    found["split"] = refusal(Recording(), DataLoader(part, batch_size=3, shuffle=True), strategy="ddp")
    with captured_warnings() as found["alike, warnings"]:
        alike = Recording()
        quiet(strategy="ddp", max_epochs=2).fit(alike, _shuffling(5), _shuffling(6))
        found["alike"] = alike.seen
        quiet(strategy="ddp", use_distributed_sampler=False, limit_val_batches=0).fit(Recording(), _shuffling(rank))
    with captured_warnings() as found["whole, warnings"]:
        loader = DataLoader(Lines(), batch_size=4)
        quiet(strategy="ddp", max_epochs=2).fit(Recording(), loader, loader)
    with captured_warnings() as found["split, warnings"]:
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
            assert found[name].startswith("ConfigurationError"), (name, found[name])
            for part in (f"the order of Shuffled, the sampler of the {whose} loader", "rank(s) [0]; ", "rank(s) [1]"):
                assert part in found[name], (name, found[name])
        assert found["trained on before that"] == 0
        assert re.match("DistributedError: (?s:.*)training subset", found["split"]), found["split"]
        assert found["alike, warnings"] == []
        assert found["split, warnings"] == []
        assert sorted(found["predicted"]) == numbers
    for name, stage, epochs in (("alike", "train", 2), ("alike", "validate", 2), ("parts", "train", 1)):
        seen = [number for found in ranks for number in found[name][stage]]
        assert sorted(seen) == sorted(numbers * epochs), (name, stage)
    warned, silent = (found["whole, warnings"] for found in ranks)
    assert silent == []
    assert len(warned) == 2  # once for each loader, whatever the number of epochs
    for line, whose in zip(warned, ("training", "validation"), strict=True):
        assert line.startswith(f"The first batch of the {whose} loader is the same on all ranks.")
        assert "split_by_rank(Lines(...))" in line
