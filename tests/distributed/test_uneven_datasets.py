"""Data whose size is not divisible, on several ranks: joining, weights, evaluation, metrics.

Rows B-04, B-10 to B-16.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from small_runs import (
    FEATURES,
    Regression,
    data,
    failing,
    global_batches,
    loader,
    quiet,
    train_by_hand,
    weights,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain.callbacks import ReplicaCheck
from drivetrain_strategies import DDPStrategy
from oracle.check import check
from oracle.program import Data, Net, Optimizer, Program
from worlds import on_ranks

TIGHT: dict[str, Any] = {"atol": 1e-6, "rtol": 1e-5}


# Lockstep and joining


class Watched(Regression):
    """Has a buffer, a metric and a batch norm, logs in every way, and communicates with other ranks in a hook."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES, momentum=0.5, affine=False)
        self.register_buffer("count", torch.zeros(()))
        self.mean = torchmetrics.MeanMetric()
        self.calls: list[tuple[str, int, bool, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        if len(x) > 1:
            self.norm(x)
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
        self.calls.append((what, batch_idx, self.trainer.joining, self.trainer.micro_batches))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.agree("start", batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("hooks", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        self.agree("end", batch_idx)


def _joining() -> dict[str, Any]:
    module = Watched()
    trainer = quiet(strategy="ddp", callbacks=ReplicaCheck(1, buffers=False))
    # 17 = 4 * 4 + 1: the last micro-batch has a sample for rank 0 alone.
    trainer.fit(module, loader(17, 4))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "weights": weights(module.net),
        "calls": module.calls,
        "metrics": metrics,
        "count": float(module.count),
        "seen": trainer.samples_seen,
        "running": module.norm.running_mean,
    }


def test_a_rank_without_a_sample_joins_and_leaves_no_trace() -> None:  # B-04, B-12, B-14
    ranks = on_ranks(_joining, 4, process_group=None)
    x = data(17).tensors[0]
    reference = weights(train_by_hand(Regression(), global_batches(17, 16)).net)
    for rank, found in enumerate(ranks):
        torch.testing.assert_close(found["weights"], reference, **TIGHT)
        assert found["seen"] == 17
        assert found["metrics"]["samples"] == 17
        assert found["metrics"]["hooks"] == 4 + 1  # four ranks, then one: joining ranks do not count
        assert found["metrics"]["largest"] == pytest.approx(float(x.max()))
        assert found["metrics"]["mean"] == pytest.approx(float(x[:, 0].mean()), abs=1e-6)
        assert found["count"] == 5  # rank 0's buffers at the end: its four samples and the last one
        for what, batch_idx, joining, _ in found["calls"]:
            assert joining == (rank > 0 and batch_idx == 1), (what, batch_idx)
        assert [call[:2] for call in found["calls"]] == [
            (what, index) for index in (0, 1) for what in ("start", "step", "end")
        ]


class NaNForOne(Regression):
    """The loss over one sample is NaN, like the variance of one sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * float("nan") if self.trainer.joining else loss


PROGRAMS = {
    "streams of unequal length": Program(data=Data("iterable", samples=14)),
    "accumulated": Program(data=Data("iterable", samples=14), accumulate=2),
    "rank 0 has the least": Program(data=Data("iterable", samples=14, fewest_on_rank_0=True), accumulate=3, epochs=2),
    "token-weighted": Program(data=Data(samples=37), token_weighted=True, net=Net(family="gru")),
    "token-weighted, accumulated": Program(
        data=Data(samples=37), token_weighted=True, net=Net(family="gru"), accumulate=3
    ),
    "LBFGS": Program(data=Data(samples=11), optimizers=(Optimizer("lbfgs"),)),
    "LBFGS, accumulated": Program(data=Data(samples=11), optimizers=(Optimizer("lbfgs"),), accumulate=3),  # B-16
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_windows_are_weighted_over_uneven_ranks(program: Program) -> None:  # B-02, B-03, B-04, B-21
    assert not check(replace(program, strategy="ddp", ranks=2))


class Stream(IterableDataset[Any]):
    """Batches of one sample, as many on each rank as ``counts`` says."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def __iter__(self) -> Iterator[Any]:
        x, y = data(1).tensors
        yield from [(x, y)] * self.counts[dist.get_rank()]


def _edge_cases() -> dict[str, Any]:
    found: dict[str, Any] = {}
    module: Regression = NaNForOne()
    quiet(strategy="ddp").fit(module, loader(17, 4))
    found["nan"] = weights(module)
    limited = quiet(strategy="ddp", limit_train_batches=4)
    limited.fit(Regression(), DataLoader(Stream(5, 3), batch_size=None))
    found["limited"] = limited.global_step, limited.samples_seen, limited.micro_batches
    for name, stream in (("none", Stream(3, 0)), ("none at all", Stream(0, 0))):
        with failing() as found[name]:
            quiet(strategy="ddp").fit(Regression(), DataLoader(stream, batch_size=None))
    module = Regression()
    quiet(strategy="ddp").fit(module, loader(16, 4))
    found["afterwards"] = weights(module)
    return found


def test_ranks_without_data_and_losses_that_are_not_numbers() -> None:  # B-04, G-07
    ranks = on_ranks(_edge_cases, 2, process_group=None)
    for found in ranks:
        torch.testing.assert_close(found["nan"], weights(train_by_hand(Regression(), global_batches(17, 8))), **TIGHT)
        assert found["limited"] == (4, 7, 4)
        for name in ("none", "none at all"):
            assert "yielded no batch" in found[name]["text"], found[name]
        torch.testing.assert_close(
            found["afterwards"], weights(train_by_hand(Regression(), global_batches(16, 8))), **TIGHT
        )
    assert ranks[1]["none"]["type"] == "ConfigurationError"
    assert ranks[0]["none"]["type"] == "RankFailedError"
    assert "Rank 1" in ranks[0]["none"]["text"]


# Evaluation


class Measured(Regression):
    """Logs every kind of value in evaluation, and predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.other_error = torchmetrics.MeanSquaredError()
        self.batches = 0

    def measure(self, batch: Any, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.batches += 1
        predicted = self.net(x)
        error = self.other_error if dataloader_idx else self.error
        error.update(predicted, y)
        self.log("mse", nn.functional.mse_loss(predicted, y))
        self.log("error", error)
        self.log("count", len(x), reduce_fx="sum")
        self.log("least", predicted.min(), reduce_fx="min")
        self.log("own", float(len(x)), sync_dist=False, reduce_fx="sum")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.measure(batch, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.measure(batch)

    def on_test_epoch_end(self) -> None:
        self.log("rank", float(self.global_rank))
        self.log("twice", 2.0, reduce_fx="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0]


class Different(Regression):
    """Logs a key of its own on one rank."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("both", 1.0)
        if self.global_rank == 1:
            self.log("only_here", 1.0)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.log("nothing_elsewhere", 1.0)


def _evaluated(sizes: tuple[int, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for samples in sizes:
        module = Measured()
        (found[f"test {samples}"],) = quiet(strategy="ddp").test(module, loader(samples, 4), verbose=False)
        found[f"batches {samples}"] = module.batches
        found[f"reset {samples}"] = int(module.error.total)
        found[f"predict {samples}"] = torch.cat(quiet(strategy="ddp").predict(module, loader(samples, 4, shuffle=True)))
    two = quiet(strategy="ddp").validate(Measured(), [loader(9, 4), loader(3, 4)], verbose=False)
    found["two loaders"] = two
    with failing() as found["keys"]:
        quiet(strategy="ddp").validate(Different(), loader(32, 4), verbose=False)
    with failing() as found["no keys"]:
        quiet(strategy="ddp").test(Different(), loader(32, 4), verbose=False)
    return found


def test_evaluation_counts_every_sample_once() -> None:  # B-04, B-12, B-14
    sizes, world_size = (1, 2, 3, 17, 33), 4
    ranks = on_ranks(_evaluated, world_size, sizes)
    for samples in sizes:
        x, y = data(samples).tensors
        with torch.no_grad():
            predicted = Regression().net(x)
        mse = float(nn.functional.mse_loss(predicted, y))
        busy = min(samples, world_size)
        for rank, found in enumerate(ranks):
            result = found[f"test {samples}"]
            assert set(result) - {"own"} == {"mse", "error", "count", "least", "rank", "twice"}, (samples, rank, result)
            assert result["mse"] == pytest.approx(mse, rel=1e-5)
            assert result["error"] == pytest.approx(mse, rel=1e-5)
            assert result["count"] == samples
            assert result["least"] == pytest.approx(float(predicted.min()), rel=1e-5)
            # A value that a hook logs once per rank has weight one on every rank, whatever the last batch's size.
            assert result["rank"] == pytest.approx((world_size - 1) / 2), (samples, rank)
            assert result["twice"] == 2 * world_size
            assert (found[f"batches {samples}"] > 0) == (rank < busy)
            assert found[f"reset {samples}"] == 0
            assert torch.equal(found[f"predict {samples}"], x)
        assert sum(found[f"test {samples}"].get("own", 0.0) for found in ranks) == samples
    for found in ranks:
        first, second = found["two loaders"]
        assert first["count/dataloader_idx_0"] == 9
        assert second["count/dataloader_idx_1"] == 3
        assert found["keys"]["type"] == found["no keys"]["type"] == "DistributedError"
        others = [0, *range(2, world_size)]
        assert f"'only_here' on rank(s) [1] and not on {others}" in found["keys"]["text"]
        assert f"'nothing_elsewhere' on rank(s) [0] and not on {[*range(1, world_size)]}" in found["no keys"]["text"]


class ByEpoch(Regression):
    """Logs a torchmetrics object in training, by step and by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.results: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean(batch[0][:, 0])
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("synced", float(self.global_rank), sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.results.append(float(self.trainer.callback_metrics["mean_epoch"]))


class Stepwise(Regression):
    """Logs a value to be reduced at a flush, only on some ranks and in some steps."""

    def __init__(self, ranks: tuple[int, ...] = (0, 1), every: int = 1) -> None:
        super().__init__()
        self.ranks = ranks
        self.every = every

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank in self.ranks and batch_idx % self.every == 0:
            self.log("sum", 1.0, sync_dist=True, reduce_fx="sum")
        return self.loss(batch)


def _stepwise() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module, samples in (
        ("all", Stepwise(), 64),
        ("seldom", Stepwise(every=4), 64),
        ("rank 1 joins", Stepwise(), 1),
        ("rank 1 joins at last", Stepwise(), 9),
    ):
        trainer = quiet(strategy="ddp", log_every_n_steps=1)
        trainer.fit(module, loader(samples, 4))
        found[name] = float(trainer.callback_metrics["sum"])
    for name, ranks in (("rank 0", (0,)), ("rank 1", (1,))):
        with failing() as found[name]:
            quiet(strategy="ddp", log_every_n_steps=1).fit(Stepwise(ranks), loader(64, 4))
    return found


def test_step_values_are_reduced_at_a_flush() -> None:  # B-12
    for found in on_ranks(_stepwise, 2, process_group=None):
        assert found["all"] == 2.0
        assert found["seldom"] == 2.0  # and not counted again at each later flush
        assert found["rank 1 joins"] == 1.0
        assert found["rank 1 joins at last"] == 1.0
        for name, other in (("rank 0", 1), ("rank 1", 0)):
            assert f"'sum' on rank(s) [{1 - other}] and not on [{other}]" in found[name]["text"], found[name]


def _by_epoch() -> dict[str, Any]:
    module = ByEpoch()
    trainer = quiet(strategy="ddp", max_epochs=3, log_every_n_steps=1, seed=3)
    trainer.fit(module, loader(34, 4))
    return {
        "results": module.results,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def test_epoch_metrics_are_over_all_ranks_and_restart() -> None:  # B-12, B-14
    ranks = on_ranks(_by_epoch, 2, process_group=None)
    exact = float(data(34).tensors[0][:, 0].mean())
    for found in ranks:
        assert found["results"] == pytest.approx([exact] * 3, abs=1e-6)
        assert found["metrics"]["synced"] == 0.5
    assert ranks[0]["metrics"]["loss_epoch"] == ranks[1]["metrics"]["loss_epoch"]


# B-10, B-11: draws and order


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


def _drawn(batch_size: int, cases: int) -> dict[str, Any]:
    found = {}
    for name, workers, persistent in (("one", 1, False), ("two, persistent", 2, True))[:cases]:
        module = Collecting()
        loaders = DataLoader(
            Drawing(), batch_size=batch_size, shuffle=True, num_workers=workers, persistent_workers=persistent
        )
        quiet(max_epochs=2, seed=11).fit(module, loaders)
        found[name] = module.got
    return found


def test_order_and_draws() -> None:  # B-10, B-11
    one, two, four = (on_ranks(_drawn, size, 8 // size, 2 if size < 4 else 1, process_group=None) for size in (1, 2, 4))
    everything: list[torch.Tensor] = []
    for epoch in range(2):
        whole = [batch[:, 0].tolist() for batch in one[0]["one"][epoch]]
        assert sorted(chain.from_iterable(whole)) == list(range(42))
        for ranks in (two, four):
            parts = [found["one"][epoch] for found in ranks]
            global_batches_of_parts = [
                [*chain.from_iterable(part[k][:, 0].tolist() for part in parts if k < len(part))]
                for k in range(len(whole))
            ]
            assert global_batches_of_parts == whole  # the same global batches, in the same order
        for ranks in (one, two):
            for found in ranks:
                batches = found["one"][epoch]
                for batch, again in zip(batches, found["two, persistent"][epoch], strict=True):
                    assert torch.equal(batch, again)  # for any number of workers
        everything += [batch[:, 1:] for found in four for batch in found["one"][epoch]]
    for column in torch.cat(everything).T:
        assert len(column.unique()) == len(column)  # no random number repeats, on any rank or epoch


# all_gather


class Contrastive(Regression):
    """The loss is computed over the batches of all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x)
        with_grad = self.all_gather(out, sync_grads=True)
        assert with_grad.shape == (self.trainer.world_size, *out.shape)
        everything = with_grad.flatten(0, 1)
        targets = self.all_gather(y).flatten(0, 1)
        nested = self.all_gather({"a": out, "b": [1, (2.5, True)]})
        assert nested["a"].shape == with_grad.shape
        assert not nested["a"].requires_grad
        assert nested["b"][0].tolist() == [1] * self.trainer.world_size
        assert nested["b"][1][0].tolist() == [2.5] * self.trainer.world_size
        # Not a mean over samples: every pair counts.
        return (torch.cdist(everything, targets) ** 2).mean() - everything.std()


class OnTheWholeBatch(Regression):
    """The same in one process."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        return (torch.cdist(out, batch[1]) ** 2).mean() - out.std()


def _contrastive() -> torch.Tensor:
    module = Contrastive(lr=0.05)
    quiet(strategy="ddp", callbacks=ReplicaCheck(1)).fit(module, loader(32, 4))
    return weights(module)


def test_a_loss_over_the_samples_of_all_ranks() -> None:  # B-16
    reference = weights(train_by_hand(OnTheWholeBatch(lr=0.05), global_batches(32, 8)))
    for found in on_ranks(_contrastive, 2, process_group=None):
        torch.testing.assert_close(found, reference, atol=1e-5, rtol=1e-4)


# Buffers


class Buffered(Regression):
    """Has buffers of several dtypes; each rank writes its own values."""

    mask: torch.Tensor
    index: torch.Tensor
    turned: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("index", torch.zeros(2, dtype=torch.int64), persistent=False)
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("turned", torch.zeros(2, 3).T)
        self.seen: list[torch.Tensor] = []

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(self.norm(x)), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mask[self.global_rank] = True
        self.index += self.global_rank + 1
        self.turned += self.global_rank
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))
        assert self.norm.running_mean is not None
        self.seen.append(self.norm.running_mean.clone())


def _buffers() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, strategy in (("ddp", "ddp"), ("no broadcast", DDPStrategy(broadcast_buffers=False))):
        module = Buffered()
        quiet(strategy=strategy, max_epochs=2).fit(module, loader(32, 4), loader(16, 4))
        found[name] = {
            "buffers": {key: value.clone() for key, value in module.named_buffers()},
            "seen": module.seen[-1],
        }
    return found


def test_buffers_are_rank_0s_in_evaluation_and_after_fit() -> None:  # B-08
    first, second = on_ranks(_buffers, 2, process_group=None)
    for name in ("ddp", "no broadcast"):
        assert torch.equal(first[name]["seen"], second[name]["seen"])
        for key, value in first[name]["buffers"].items():
            assert torch.equal(value, second[name]["buffers"][key]), key
        assert first[name]["buffers"]["mask"].tolist() == [True, False, False]
        assert first[name]["buffers"]["turned"].shape == (3, 2)
    assert first["no broadcast"]["buffers"]["index"].tolist() == [8, 8]
