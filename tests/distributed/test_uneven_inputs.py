"""The inputs of a rank without data, and the state that it leaves behind. Row I-07."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from small_runs import FEATURES, Regression, about, data, quiet, train_by_hand, weights
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from worlds import on_ranks

TIGHT: dict[str, Any] = {"atol": 1e-6, "rtol": 1e-5}
SIZE = 4


def own_batches(rank: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A rank's own part of an iterable data set, in batches of four."""
    x, y = data(64).tensors
    starts = range(rank * 32, rank * 32 + count * SIZE, SIZE)
    return [(x[start : start + SIZE], y[start : start + SIZE]) for start in starts]


def by_hand(module: Regression, counts: tuple[int, int], window: int = 1) -> torch.Tensor:
    """Return the weights after one epoch over both ranks' data, one window at a time."""
    parts = [own_batches(rank, count) for rank, count in enumerate(counts)]
    batches = []
    for start in range(0, max(counts), window):
        pieces = [batch for part in parts for batch in part[start : start + window]]
        batches.append(tuple(torch.cat([piece[position] for piece in pieces]) for position in range(2)))
    return weights(train_by_hand(module, batches, step=lambda batch, _: module.loss(batch)))


# Containers


@dataclass
class Pair:
    """A batch of a user-defined class."""

    x: torch.Tensor
    y: torch.Tensor | None


class Stream(IterableDataset[Any]):
    """A rank's own stream with a given number of batches, in one kind of container."""

    def __init__(self, counts: tuple[int, ...], kind: str) -> None:
        self.counts = counts
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        rank = dist.get_rank()
        for x, y in own_batches(rank, self.counts[rank]):
            if self.kind == "nested":
                yield {"given": [x, {"y": y}]}
            elif self.kind == "dataclass":
                yield Pair(x, y)
            else:
                yield {"dict": dict, "encoding": UserDict}[self.kind](x=x, y=y)


class Going(Stream):
    """Has a state_dict of its position, so nothing is read ahead of training."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("nothing is resumed here")


class Spoiling(Regression):
    """Modifies its batch while using it."""

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


def _spoiled() -> dict[str, torch.Tensor]:
    found = {}
    for kind in ("dict", "encoding", "nested", "dataclass"):
        for window in (1, 2):
            module = Spoiling()
            stream = Stream((2, 5), kind)
            quiet(strategy="ddp", accumulate_grad_batches=window).fit(module, DataLoader(stream, batch_size=None))
            found[f"{kind}, {window}"] = weights(module)
    for window in (1, 2):
        module = Spoiling()
        stream = Going((2, 5), "dict")
        quiet(strategy="ddp", accumulate_grad_batches=window).fit(module, DataLoader(stream, batch_size=None))
        found[f"going on, {window}"] = weights(module)
    return found


def test_a_joining_rank_gets_containers_of_its_own() -> None:  # I-07
    for found in on_ranks(_spoiled, 2, process_group=None):
        for name, trained in found.items():
            reference = by_hand(Regression(), (2, 5), int(name[-1]))
            torch.testing.assert_close(trained, reference, msg=about(name), **TIGHT)


# Buffers


class Statistics(nn.Module):
    """Keeps a running mean that it reassigns each time."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("latest", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        self.latest = x.detach()[0].clone()
        return x


class Reassigning(Regression):
    """Reassigns its buffers in each step, except one that is changed in place."""

    count: torch.Tensor
    written: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.statistics = Statistics()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("written", torch.zeros(()), persistent=False)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        self.count = self.count + len(x)
        self.written += len(x)
        return nn.functional.mse_loss(self.net(self.statistics(x)), y)


class ByHand(Reassigning):
    """The same in manual optimization."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class OwnStream(IterableDataset[Any]):
    """A rank's own batches, unchanged."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts = counts

    def __iter__(self) -> Iterator[Any]:
        yield from own_batches(dist.get_rank(), self.counts[dist.get_rank()])


def _reassigned() -> dict[str, Any]:
    found = {}
    for strategy in ("ddp", "fsdp"):
        for kind in (Reassigning, ByHand):
            module = kind()
            trainer = quiet(strategy=strategy)
            # Rank 0 joins in the last two steps, and its buffers are used on all ranks after the run.
            trainer.fit(module, DataLoader(OwnStream((3, 5)), batch_size=None))
            assert trainer.global_step == 5
            found[f"{strategy}, {kind.__name__}"] = (weights(module), dict(module.named_buffers()))
    return found


def test_reassigned_buffers_of_a_joining_rank_are_restored() -> None:  # I-07
    reference = Reassigning()
    for batch in own_batches(0, 3):  # what rank 0 has data for
        reference.loss(batch)
    buffers = dict(reference.named_buffers())
    trained = by_hand(Reassigning(), (3, 5))
    for found in on_ranks(_reassigned, 2, process_group=None):
        for case, (own, kept) in found.items():
            torch.testing.assert_close(own, trained, msg=about(case), **TIGHT)
            assert set(kept) == set(buffers)
            for name, value in buffers.items():
                torch.testing.assert_close(kept[name], value, msg=about((case, name)))


class Evaluated(Reassigning):
    """Counts its evaluation samples, in a buffer that it reassigns."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss(batch)
        return batch[0]


def _evaluated() -> dict[str, tuple[float, int]]:
    found = {}
    for strategy in ("ddp", "fsdp"):
        for stage in ("validate", "predict"):
            module = Evaluated()
            # A sample for rank 0 only: under a strategy whose forward is collective rank 1 runs along.
            loader = DataLoader(data(1), batch_size=1)
            trainer = quiet(strategy=strategy)
            if stage == "validate":
                trainer.validate(module, loader, verbose=False)
            else:
                trainer.predict(module, loader)
            found[f"{strategy}, {stage}"] = module.statistics.mean.abs().sum().item(), int(module.count)
    return found


def test_evaluation_leaves_no_trace_on_a_joining_rank() -> None:  # I-07
    x = data(1).tensors[0]
    first, second = on_ranks(_evaluated, 2, process_group=None)
    for case in first:
        # After the run rank 0's buffers are used on all ranks; they contain rank 0's samples.
        assert first[case] == second[case], case
        assert first[case][1] == 1, case
        assert abs(first[case][0] - 0.5 * float(x.abs().sum())) < 1e-6, case


class Growing(Regression):
    """Creates a buffer when it first sees data, and lets another one grow."""

    first: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", None)
        self.register_buffer("seen", torch.zeros(0, FEATURES), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        if self.first is None:
            self.first = x[0].clone()
        self.seen = torch.cat([self.seen, x])
        return self.loss(batch)


def _grown() -> dict[str, Any]:
    found = {}
    for strategy in ("ddp", "fsdp"):
        for samples in (1, 9):
            module = Growing()
            quiet(strategy=strategy).fit(module, DataLoader(data(samples), batch_size=4))
            found[f"{strategy}, {samples}"] = dict(module.named_buffers())
    return found


def test_buffers_that_differ_in_form_become_rank_0s() -> None:  # I-07, B-08
    for found in on_ranks(_grown, 2, process_group=None):
        for case, buffers in found.items():
            x = data(int(case.split()[-1])).tensors[0]
            # Of nine samples rank 0 gets the first four and the last.
            seen = torch.cat([x[:4], x[8:]])
            assert torch.equal(buffers["first"], x[0]), case
            assert torch.equal(buffers["seen"], seen), case
