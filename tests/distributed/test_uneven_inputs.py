"""The inputs of a rank without data, and the state that it leaves behind. Row I-07."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import FEATURES, TIGHTER, Regression, about, data, quiet, train_by_hand, trained, weights
from torch.utils.data import DataLoader, IterableDataset

from drivetrain_strategies import DDPStrategy
from worlds import on_ranks

SIZE = 4


def own_batches(rank: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A rank's own part of an iterable data set, in batches of four."""
    x, y = data(64).tensors
    starts = range(rank * 32, rank * 32 + count * SIZE, SIZE)
    return [(x[start : start + SIZE], y[start : start + SIZE]) for start in starts]


@dataclass
class Pair:
    """A batch of a user-defined class."""

    x: torch.Tensor
    y: torch.Tensor | None


class Stream(IterableDataset[Any]):
    """A rank's own stream with a given number of batches, in one kind of container."""

    def __init__(self, counts: tuple[int, ...], make: Any) -> None:
        self.counts, self.make = counts, make

    def __iter__(self) -> Iterator[Any]:
        rank = dist.get_rank()
        return (self.make(x, y) for x, y in own_batches(rank, self.counts[rank]))


class StatefulStream(Stream):
    """Has a state_dict of its position, so nothing is read ahead of training."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("nothing is resumed here")


def as_dict(x: torch.Tensor, y: torch.Tensor) -> Any:
    return {"x": x, "y": y}


def as_encoding(x: torch.Tensor, y: torch.Tensor) -> Any:
    return UserDict(x=x, y=y)


def as_nested(x: torch.Tensor, y: torch.Tensor) -> Any:
    return {"given": [x, {"y": y}]}


class TakesBatchesApart(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, Pair):
            x, y = batch.x, batch.y
            batch.y = None
            assert y is not None
        elif "given" in batch:
            x, y = batch["given"].pop(0), batch["given"].pop(0).pop("y")
        else:
            x, y = batch["x"], batch.pop("y")
        return self.loss((x, y))


COUNTS = (2, 5)
STREAMS = [(Stream, as_dict), (Stream, as_encoding), (Stream, as_nested), (Stream, Pair), (StatefulStream, as_dict)]


def _taken_apart(window: int) -> list[torch.Tensor]:
    loaders = [DataLoader(kind(COUNTS, make), batch_size=None) for kind, make in STREAMS]
    options: dict[str, Any] = {"strategy": "ddp", "accumulate_grad_batches": window}
    return [trained(TakesBatchesApart(), batches, **options) for batches in loaders]


@pytest.mark.parametrize("window", [1, 2])
def test_a_joining_rank_gets_containers_of_its_own(window: int) -> None:  # I-07
    parts = [own_batches(rank, count) for rank, count in enumerate(COUNTS)]
    batches = []
    for start in range(0, max(COUNTS), window):
        pieces = [batch for part in parts for batch in part[start : start + window]]
        batches.append(tuple(torch.cat([piece[at] for piece in pieces]) for at in range(2)))
    expected = weights(train_by_hand(Regression(), batches))
    for found in on_ranks(_taken_apart, 2, window, process_group=None):
        for stream, actual in zip(STREAMS, found, strict=True):
            torch.testing.assert_close(actual, expected, msg=about(stream), **TIGHTER)


class CountsInEvaluation(Regression):
    """Counts and averages its evaluation samples, in buffers that it reassigns or writes to."""

    count: torch.Tensor
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(FEATURES))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.predict_step(batch, batch_idx)
        self.log("val", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.count = self.count + len(batch[0])
        self.mean += batch[0].mean(0)
        return self.net(batch[0])


def _evaluated(strategy: str, stage: str) -> dict[str, torch.Tensor]:
    module = CountsInEvaluation()
    # A sample for rank 0 only: under a strategy whose forward is collective rank 1 runs along.
    getattr(quiet(strategy=strategy), stage)(module, DataLoader(data(1), batch_size=1))
    return dict(module.named_buffers())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_evaluation_leaves_no_trace_on_a_joining_rank(strategy: str, stage: str) -> None:  # I-07
    # After the run rank 0's buffers are used on all ranks; they contain rank 0's samples.
    for buffers in on_ranks(_evaluated, 2, strategy, stage, process_group=None):
        assert int(buffers["count"]) == 1
        assert torch.equal(buffers["mean"], data(1).tensors[0][0])


class Growing(Regression):
    """Creates a buffer when it first sees data, lets another one grow, and writes each rank's own values to others."""

    first: torch.Tensor
    seen: torch.Tensor
    mask: torch.Tensor
    turned: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", None)
        self.register_buffer("seen", torch.zeros(0, FEATURES), persistent=False)
        self.register_buffer("mask", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("turned", torch.zeros(2, 3).T)
        self.validated: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        if self.first is None:
            self.first = x[0].clone()
        self.seen = torch.cat([self.seen, x])
        self.mask[self.global_rank] = True
        self.turned += 1 + self.global_rank
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.turned.clone())


def _grown(strategy: str, samples: int) -> dict[str, Any]:
    module = Growing()
    chosen = DDPStrategy(broadcast_buffers=False) if strategy == "ddp, buffers apart" else strategy
    trained(module, DataLoader(data(samples), batch_size=4), DataLoader(data(2), batch_size=1), strategy=chosen)
    return {**dict(module.named_buffers()), "validated": module.validated[0]}


@pytest.mark.parametrize("strategy", ["ddp", "ddp, buffers apart", "fsdp"])
@pytest.mark.parametrize("samples", [1, 9])
def test_buffers_are_rank_0s_in_evaluation_and_after_fit(strategy: str, samples: int) -> None:  # I-07, B-08
    x = data(samples).tensors[0]
    for buffers in on_ranks(_grown, 2, strategy, samples, process_group=None):
        # Of nine samples rank 0 gets the first four and the last.
        assert torch.equal(buffers["first"], x[0])
        assert torch.equal(buffers["seen"], torch.cat([x[:4], x[8:]]))
        assert buffers["mask"].tolist() == [True, False]
        assert torch.equal(buffers["turned"], torch.full((3, 2), 1.0 if samples == 1 else 2.0))
        assert torch.equal(buffers["validated"], buffers["turned"])
