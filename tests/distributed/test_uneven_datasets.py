"""Data whose size is not divisible, on several ranks: joining, evaluation, logged values, draws.

Rows B-04, B-10 to B-12, B-14, B-16. Windows over uneven ranks are in test_programs_on_ranks.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from small_runs import (
    FEATURES,
    TIGHTER,
    Regression,
    data,
    failing,
    global_batches,
    loader,
    quiet,
    refusal,
    train_by_hand,
    trained,
    weights,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain.callbacks import ReplicaCheck
from worlds import on_ranks


class Watched(Regression):
    """Has a buffer and a metric, logs in every way, and communicates with other ranks in a hook."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.mean = torchmetrics.MeanMetric()
        self.calls: list[tuple[str, int, bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        self.count += len(x)
        self.mean.update(x[:, 0])
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("samples", len(x), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", float(x.max()), on_step=False, on_epoch=True, reduce_fx="max")
        self.agree("step", batch_idx)
        return self.loss(batch)

    def agree(self, what: str, batch_idx: int) -> None:
        gathered = self.all_gather(torch.tensor(batch_idx))
        assert gathered.tolist() == [batch_idx] * self.trainer.world_size  # every rank makes the same calls
        self.calls.append((what, batch_idx, self.trainer.joining))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.agree("start", batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("hooks", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        self.agree("end", batch_idx)


def _joining() -> dict[str, Any]:
    module = Watched()
    trainer = quiet(strategy="ddp", callbacks=ReplicaCheck(1, buffers=False))
    trainer.fit(module, loader(17, 4))  # 17 = 4 * 4 + 1: the last micro-batch has a sample for rank 0 alone
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found |= {"count": float(module.count), "seen": trainer.samples_seen}
    return {"weights": weights(module.net), "calls": module.calls, "numbers": found}


def test_a_rank_without_a_sample_joins_and_leaves_no_trace() -> None:  # B-04, B-12, B-14
    x = data(17).tensors[0]
    reference = weights(train_by_hand(Regression(), global_batches(17, 16)).net)
    numbers = {"samples": 17, "seen": 17, "largest": float(x.max()), "mean": float(x[:, 0].mean())}
    numbers["hooks"] = 4 + 1  # four ranks, then one: joining ranks do not count
    numbers["count"] = 5  # rank 0's buffers at the end: its four samples and the last one
    for rank, found in enumerate(on_ranks(_joining, 4, process_group=None)):
        torch.testing.assert_close(found["weights"], reference, **TIGHTER)
        assert found["numbers"] == pytest.approx(numbers, abs=1e-6)
        assert found["calls"] == [
            (what, index, rank > 0 and index == 1) for index in (0, 1) for what in ("start", "step", "end")
        ]


class NaNWhenJoining(Regression):
    """The loss over the sample that a joining rank repeats is NaN, like the variance of one sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * float("nan") if self.trainer.joining else loss


class Stream(IterableDataset[Any]):
    """Batches of one sample, as many on each rank as ``counts`` says."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def __iter__(self) -> Iterator[Any]:
        x, y = data(1).tensors
        yield from [(x, y)] * self.counts[dist.get_rank()]


def _edge_cases() -> dict[str, Any]:
    found: dict[str, Any] = {"nan": trained(NaNWhenJoining(), loader(17, 4), strategy="ddp")}
    limited = quiet(strategy="ddp", limit_train_batches=4)
    limited.fit(Regression(), DataLoader(Stream(5, 3), batch_size=None))
    found["limited"] = limited.global_step, limited.samples_seen, limited.micro_batches
    for name, stream in (("none", Stream(3, 0)), ("none at all", Stream(0, 0))):
        found[name] = refusal(Regression(), DataLoader(stream, batch_size=None), strategy="ddp")
    found["afterwards"] = trained(Regression(), loader(16, 4), strategy="ddp")
    return found


def test_ranks_without_data_and_losses_that_are_not_numbers() -> None:  # B-04, G-07
    ranks = on_ranks(_edge_cases, 2, process_group=None)
    for found in ranks:
        for name, samples in (("nan", 17), ("afterwards", 16)):
            expected = weights(train_by_hand(Regression(), global_batches(samples, 8)))
            torch.testing.assert_close(found[name], expected, **TIGHTER)
        assert found["limited"] == (4, 7, 4)
        assert "yielded no batch" in found["none"]
        assert "yielded no batch" in found["none at all"]
    assert ranks[1]["none"].startswith("ConfigurationError")
    assert ranks[0]["none"].startswith("RankFailedError")
    assert "Rank 1" in ranks[0]["none"]


class Measured(Regression):
    """Logs in evaluation what tests/parity does not log."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        self.log("count", len(batch[0]), reduce_fx="sum")
        self.log("least", batch[0].min(), reduce_fx="min")
        self.log("own", float(len(batch[0])), sync_dist=False, reduce_fx="sum")

    def on_test_epoch_end(self) -> None:
        self.log("rank", float(self.global_rank))
        self.log("twice", 2.0, reduce_fx="sum")


class LogsKeysOfItsOwn(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("both", 1.0)
        if self.global_rank == 1:
            self.log("only_here", 1.0)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.log("nothing_elsewhere", 1.0)


def _evaluated(sizes: tuple[int, ...]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for samples in sizes:
        module = Measured()
        (result,) = quiet(strategy="ddp").test(module, loader(samples, 4), verbose=False)
        found[samples] = result, module.batches
    for stage in ("validate", "test"):
        with failing() as found[stage]:
            getattr(quiet(strategy="ddp"), stage)(LogsKeysOfItsOwn(), loader(32, 4), verbose=False)
    return found


def test_evaluation_counts_every_sample_once() -> None:  # B-04, B-12
    sizes, world_size = (1, 3, 17), 4
    ranks = on_ranks(_evaluated, world_size, sizes)
    for samples in sizes:
        # A value that a hook logs once per rank has weight one on every rank, whatever the last batch's size.
        expected = {"count": samples, "rank": (world_size - 1) / 2, "twice": 2 * world_size}
        expected["least"] = float(data(samples).tensors[0].min())
        own = 0.0
        for rank, found in enumerate(ranks):
            result, batches = found[samples]
            own += result.pop("own", 0.0)
            assert result == pytest.approx(expected), (samples, rank)
            assert (batches > 0) == (rank < min(samples, world_size))
        assert own == samples
    for found in ranks:
        assert found["validate"]["type"] == found["test"]["type"] == "DistributedError"
        assert "'only_here' on rank(s) [1] and not on [0, 2, 3]" in found["validate"]["text"]
        assert "'nothing_elsewhere' on rank(s) [0] and not on [1, 2, 3]" in found["test"]["text"]


class Stepwise(Regression):
    """Logs a value to be reduced at a flush, only on some ranks and in some steps."""

    def __init__(self, ranks: tuple[int, ...] = (0, 1), every: int = 1) -> None:
        super().__init__()
        self.ranks, self.every = ranks, every

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank in self.ranks and batch_idx % self.every == 0:
            self.log("sum", 1.0, sync_dist=True, reduce_fx="sum")
        return self.loss(batch)


def _stepwise() -> tuple[list[float], list[str]]:
    sums = []
    for module, samples in ((Stepwise(), 64), (Stepwise(every=4), 64), (Stepwise(), 1), (Stepwise(), 9)):
        trainer = quiet(strategy="ddp", log_every_n_steps=1)
        trainer.fit(module, loader(samples, 4))
        sums.append(float(trainer.callback_metrics["sum"]))
    options: dict[str, Any] = {"strategy": "ddp", "log_every_n_steps": 1}
    return sums, [refusal(Stepwise((rank,)), loader(64, 4), **options) for rank in (0, 1)]


def test_step_values_are_reduced_at_a_flush() -> None:  # B-12
    for sums, refused in on_ranks(_stepwise, 2, process_group=None):
        # The second is not counted again at each later flush; in the last two, rank 1 joins.
        assert sums == [2.0, 2.0, 1.0, 1.0]
        for rank, text in enumerate(refused):
            assert f"'sum' on rank(s) [{rank}] and not on [{1 - rank}]" in text


class Drawing(Dataset[Any]):
    """A sample is its index and a random number drawn by the worker."""

    def __len__(self) -> int:
        return 42

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([float(index), *drawn])


class Collecting(Regression):
    """Records its samples by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.got: dict[int, list[torch.Tensor]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.trainer.joining:
            self.got.setdefault(self.current_epoch, []).append(batch.clone())
        return self.net(batch[:, :1].expand(-1, FEATURES)).square().mean() * 1e-6


def _drawn(batch_size: int, workers: tuple[int, ...]) -> list[dict[int, list[torch.Tensor]]]:
    found = []
    for number in workers:
        module = Collecting()
        options: dict[str, Any] = {"num_workers": number, "persistent_workers": number > 1}
        batches = DataLoader(Drawing(), batch_size=batch_size, shuffle=True, **options)
        quiet(max_epochs=2, seed=11).fit(module, batches)
        found.append(module.got)
    return found


def test_order_and_draws_do_not_depend_on_ranks_and_workers() -> None:  # B-10, B-11
    ((alone,),) = on_ranks(_drawn, 1, 8, (1,), process_group=None)
    ranks = on_ranks(_drawn, 2, 4, (1, 2), process_group=None)
    draws: list[torch.Tensor] = []
    for epoch in range(2):
        whole = [batch[:, 0].tolist() for batch in alone[epoch]]
        assert sorted(chain.from_iterable(whole)) == list(range(42))
        parts = [found[0][epoch] for found in ranks]
        together = [
            [*chain.from_iterable(part[number][:, 0].tolist() for part in parts if number < len(part))]
            for number in range(len(whole))
        ]
        assert together == whole  # the same global batches, in the same order
        for one_worker, two_workers in ranks:
            for batch, again in zip(one_worker[epoch], two_workers[epoch], strict=True):
                assert torch.equal(batch, again)
        draws += [batch[:, 1:] for part in parts for batch in part]
    for column in torch.cat(draws).T:
        assert len(column.unique()) == len(column)  # no random number repeats, on any rank or epoch


class Contrastive(Regression):
    """The loss is computed over the batches of all ranks: not a mean over samples, since every pair counts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        with_grad = self.all_gather(out, sync_grads=True)
        assert with_grad.shape == (self.trainer.world_size, *out.shape)
        everything = with_grad.flatten(0, 1)
        targets = self.all_gather(batch[1]).flatten(0, 1)
        nested = self.all_gather({"a": out, "b": [1, (2.5, True)]})
        assert nested["a"].shape == with_grad.shape
        assert not nested["a"].requires_grad
        assert nested["b"][0].tolist() == [1] * self.trainer.world_size
        assert nested["b"][1][0].tolist() == [2.5] * self.trainer.world_size
        return (torch.cdist(everything, targets) ** 2).mean() - everything.std()


def contrastive_loss(module: Regression, batch: Any) -> torch.Tensor:
    """The same in one process."""
    out = module.net(batch[0])
    return (torch.cdist(out, batch[1]) ** 2).mean() - out.std()


def _contrastive() -> torch.Tensor:
    return trained(Contrastive(lr=0.05), loader(32, 4), strategy="ddp", callbacks=ReplicaCheck(1))


def test_a_loss_over_the_samples_of_all_ranks() -> None:  # B-16
    module = Regression(lr=0.05)
    train_by_hand(module, global_batches(32, 8), step=lambda batch, batch_idx: contrastive_loss(module, batch))
    for found in on_ranks(_contrastive, 2, process_group=None):
        torch.testing.assert_close(found, weights(module), atol=1e-5, rtol=1e-4)
