"""Data of several ranks, uneven or in wrong orders: joining, values, buffers, lengths (see the programs, too). I-08."""

from __future__ import annotations

import os
import random
import re
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from small_runs import (
    FEATURES,
    TIGHTER,
    Regression,
    about,
    data,
    each,
    failing,
    global_batches,
    loader,
    quiet,
    refusal,
    train_by_hand,
    trained,
    weights,
)
from torch.utils.data import DataLoader, IterableDataset, Sampler, random_split

from captured_warnings import captured_warnings
from drivetrain.callbacks import LambdaCallback, ReplicaCheck
from drivetrain.data import split_by_rank
from drivetrain_strategies import DDPStrategy, FSDPStrategy
from worlds import on_ranks
from wrong_lengths import Batches


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


def _joining() -> tuple[torch.Tensor, list[Any], dict[str, float]]:
    module, trainer = Watched(), quiet(strategy="ddp", callbacks=ReplicaCheck(1))
    trainer.fit(module, loader(17, 4))  # 17 = 4 * 4 + 1: the last micro-batch has a sample for rank 0 alone
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return weights(module.net), module.calls, {**found, "count": float(module.count), "seen": trainer.samples_seen}


def test_a_rank_without_a_sample_joins_and_leaves_no_trace() -> None:  # B-04, B-12, B-14
    x = data(17).tensors[0]
    reference = weights(train_by_hand(Regression(), global_batches(17, 16)).net)
    expected = {"samples": 17, "seen": 17, "largest": float(x.max()), "mean": float(x[:, 0].mean())}
    expected["hooks"] = 4 + 1  # four ranks, then one: joining ranks do not count
    expected["count"] = 5  # rank 0's buffers at the end: its four samples and the last one
    for rank, (trained_weights, calls, numbers) in enumerate(on_ranks(_joining, 4, process_group=None)):
        torch.testing.assert_close(trained_weights, reference, **TIGHTER)
        assert numbers == pytest.approx(expected, abs=1e-6)
        assert calls == [(what, at, rank > 0 and at == 1) for at in (0, 1) for what in ("start", "step", "end")]


class NaNWhenJoining(Regression):
    """The loss over the sample that a joining rank repeats is NaN, like the variance of one sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss * float("nan") if self.trainer.joining else loss


class Stream(IterableDataset[Any]):
    """As many batches of four on each rank as ``counts`` says, from its own part of 64 samples, in a container."""

    def __init__(self, *counts: int, make: Any = lambda x, y: (x, y)) -> None:
        self.counts, self.make = counts, make

    def __iter__(self) -> Iterator[Any]:
        rank = dist.get_rank()
        return (self.make(x, y) for x, y in own_batches(rank, self.counts[rank]))


def own_batches(rank: int, count: int) -> list[Any]:
    return global_batches(64, 4)[8 * rank : 8 * rank + count]


def streamed(*counts: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Stream(*counts, **options), batch_size=None)


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor | None


def containers(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    return {"mapping": UserDict(x=x), "nested": [x, {"y": y}], "pair": Pair(x, y)}


class TakesBatchesApart(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, pair = batch["mapping"].pop("x"), batch.pop("nested").pop().pop("y"), batch["pair"]
        assert torch.equal(pair.y, y)
        pair.y = None
        return self.loss((x, y))


def _edge_cases() -> dict[str, Any]:
    found: dict[str, Any] = {"nan": trained(NaNWhenJoining(), loader(17, 4), strategy="ddp")}
    limited = quiet(strategy="ddp", limit_train_batches=4)
    limited.fit(Regression(), streamed(5, 3))
    found["limited"] = limited.global_step, limited.samples_seen, limited.micro_batches
    for name, stream in (("none", streamed(3, 0)), ("none at all", streamed(0, 0))):
        found[name] = refusal(Regression(), stream, strategy="ddp")
    found["afterwards"] = trained(Regression(), loader(16, 4), strategy="ddp")
    apart = streamed(2, 5, make=containers)
    found["taken apart"] = trained(TakesBatchesApart(), apart, strategy="ddp", accumulate_grad_batches=2)
    return found


def test_ranks_without_data_losses_that_are_not_numbers_and_batches_taken_apart() -> None:  # B-04, G-07, I-07
    expected = {
        name: weights(train_by_hand(Regression(), global_batches(samples, 8)))
        for name, samples in (("nan", 17), ("afterwards", 16))
    }
    windows = [[*own_batches(0, 2), *own_batches(1, 2)], own_batches(1, 5)[2:4], own_batches(1, 5)[4:]]
    batches = [tuple(torch.cat([batch[at] for batch in window]) for at in range(2)) for window in windows]
    expected["taken apart"] = weights(train_by_hand(Regression(), batches))
    ranks = on_ranks(_edge_cases, 2, process_group=None)
    for found in ranks:
        for name, wanted in expected.items():
            torch.testing.assert_close(found[name], wanted, msg=about(name), **TIGHTER)
        assert found["limited"] == (4, 4 * 7, 4)
        assert "yielded no batch" in found["none"]
        assert "yielded no batch" in found["none at all"]
    assert ranks[1]["none"].startswith("ConfigurationError")
    assert ranks[0]["none"].startswith("RankFailedError")
    assert "Rank 1" in ranks[0]["none"]


class Measured(Regression):
    """Logs in evaluation what tests/parity does not log, and keys of its own on one rank in validation."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("count", len(batch[0]), reduce_fx="sum")
        self.log("own", float(len(batch[0])), sync_dist=False, reduce_fx="sum")

    def on_test_epoch_end(self) -> None:
        self.log("rank", float(self.global_rank))
        self.log("twice", 2.0, reduce_fx="sum")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1:
            self.log("only_here", 1.0)


def _evaluated(samples: int) -> tuple[dict[str, float], dict[str, str]]:
    (found,) = quiet(strategy="ddp").test(Measured(), loader(samples, 4), verbose=False)
    with failing() as refused:
        quiet(strategy="ddp").validate(Measured(), loader(32, 4), verbose=False)
    return found, refused


def test_values_of_an_evaluation_are_reduced_over_the_ranks() -> None:  # B-04, B-12
    # A value that a hook logs once per rank has weight one on every rank, whatever the last batch's size.
    cases = [1, 3, 17]
    by_rank = on_ranks(each, 4, _evaluated, *[(samples,) for samples in cases])
    for samples, results in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert sum(found.pop("own", 0.0) for found, _ in results) == samples
        for found, refused in results:
            assert found == pytest.approx({"count": samples, "rank": 1.5, "twice": 2.0 * 4})
            assert refused["type"] == "DistributedError"
            assert 'only_here mean: missing on rank(s) [0, 2, 3]; "logged" on rank(s) [1]' in refused["text"]


class Stepwise(Regression):
    """Logs a value to be reduced at a flush, only on some ranks and in some steps."""

    def __init__(self, every: int, *ranks: int) -> None:
        super().__init__()
        self.every, self.ranks = every, ranks

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank in self.ranks and batch_idx % self.every == 0:
            self.log("sum", 1.0, sync_dist=True, reduce_fx="sum")
        return self.loss(batch)


def _stepwise(samples: int, every: int, *ranks: int) -> float | str:
    trainer = quiet(strategy="ddp", log_every_n_steps=1)
    with failing() as refused:
        trainer.fit(Stepwise(every, *ranks), loader(samples, 4))
    return refused["text"] or float(trainer.callback_metrics["sum"])


def test_step_values_are_reduced_at_a_flush() -> None:  # B-12
    # The first is not counted again at each later flush; in the second, rank 1 joins.
    for seldom, joined, refused in on_ranks(each, 2, _stepwise, (64, 4, 0, 1), (9, 1, 0, 1), (64, 1, 1)):
        assert (seldom, joined) == (2.0, 1.0)
        assert 'sum sum: missing on rank(s) [0]; "logged" on rank(s) [1]' in refused


class Contrastive(Regression):
    """The loss is computed over the batches of all ranks: not a mean over samples, since every pair counts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        nested = self.all_gather({"a": out, "b": [1, (2.5, True)]})
        assert (nested["a"].shape, nested["a"].requires_grad) == ((2, *out.shape), False)
        assert (nested["b"][0].tolist(), nested["b"][1][0].tolist()) == ([1, 1], [2.5, 2.5])
        gathered = self.all_gather(out, sync_grads=True).flatten(0, 1), self.all_gather(batch[1]).flatten(0, 1)
        return contrastive_loss(*gathered)


def contrastive_loss(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (torch.cdist(out, targets) ** 2).mean() - out.std()


def _contrastive() -> torch.Tensor:
    return trained(Contrastive(lr=0.05), loader(32, 4), strategy="ddp", callbacks=ReplicaCheck(1))


def test_a_loss_over_the_samples_of_all_ranks() -> None:  # B-16
    module = Regression(lr=0.05)
    train_by_hand(module, global_batches(32, 8), step=lambda batch, _: contrastive_loss(module.net(batch[0]), batch[1]))
    for found in on_ranks(_contrastive, 2, process_group=None):
        torch.testing.assert_close(found, weights(module), atol=1e-5, rtol=1e-4)


class ChangesBuffers(Regression):
    """Training creates a buffer, lets one grow and writes to others; prediction and validation count."""

    first: torch.Tensor
    seen: torch.Tensor
    count: torch.Tensor
    mean: torch.Tensor
    mask: torch.Tensor
    turned: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("turned", torch.zeros(2, 3).T)
        self.register_buffer("first", None)
        self.register_buffer("seen", torch.zeros(0, FEATURES), persistent=False)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(FEATURES))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.first is None:
            self.first = batch[0][0].clone()
        self.seen = torch.cat([self.seen, batch[0]])
        self.mask[self.global_rank] = True
        self.turned += self.global_rank
        return self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.count = self.count + len(batch[0])
        self.mean += batch[0].mean(0)
        return self.net(batch[0])

    validation_step = predict_step


def _change_buffers(strategy: Any, stage: str, samples: int) -> dict[str, torch.Tensor]:
    module = ChangesBuffers()
    getattr(quiet(strategy=strategy()), stage)(module, loader(samples, 4))
    return dict(module.named_buffers())


UNSHARED = partial(DDPStrategy, broadcast_buffers=False)


@pytest.mark.parametrize("strategy", [DDPStrategy, UNSHARED, FSDPStrategy], ids=["ddp", "no broadcasts", "fsdp"])
def test_after_a_run_all_ranks_have_the_buffers_of_rank_0(strategy: Any) -> None:  # I-07, B-08
    # With one sample rank 1 joins; under a strategy whose forward is collective in an evaluation, too.
    cases = [(strategy, *case) for case in (("validate", 1), ("predict", 1), ("fit", 1), ("fit", 9))]
    x, one = data(9).tensors[0], data(1).tensors[0]
    for *evaluated, short, long in on_ranks(each, 2, _change_buffers, *cases, process_group=None):
        for buffers in evaluated:
            assert int(buffers["count"]) == 1
            assert torch.equal(buffers["mean"], one[0])
        for buffers, seen in ((short, one), (long, torch.cat([x[:4], x[8:]]))):  # rank 0's first four and the last
            assert torch.equal(buffers["first"], seen[0])
            assert torch.equal(buffers["seen"], seen)
            assert buffers["mask"].tolist() == [True, False, False]
            assert torch.equal(buffers["turned"], torch.zeros(3, 2))


class Centring(Regression):
    """Subtracts a running mean from its inputs, which each rank computes over its own data."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.mean.copy_(0.5 * self.mean + 0.5 * x.mean(0))
        return self.loss((x - self.mean, y))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def on_train_end(self) -> None:
        self.at_the_end = self.mean.clone()  # before rank 0's buffers replace those of the others


class OfWrongLength(Stream):
    """Has 5 batches on rank 0 and 3 on rank 1, and states another length on both."""

    def __init__(self, length: int) -> None:
        super().__init__(5, 3)
        self.length = length

    def __len__(self) -> int:
        return self.length


READ = "micro-batches per epoch, but"
OF_WRONG_LENGTH: dict[str, Any] = {
    f"20 {READ} 5 were read on rank 0.": loader(20, 1, batch_sampler=Batches(20, 40)),
    f"3 {READ} 5 were read on rank 0.": DataLoader(OfWrongLength(3), None),
    f"5 {READ} 3 were read on rank 1.": DataLoader(OfWrongLength(5), None),
}


def _warned(strategy: str, warning: str) -> list[str]:
    batches = OF_WRONG_LENGTH[warning]
    with captured_warnings() as lines:
        quiet(strategy=strategy, max_epochs=2).fit(Centring(), batches, batches)
    return [text for text in lines if "proved wrong" in text]


def test_a_wrong_length_is_warned_about_once_for_each_loader() -> None:  # I-04; the programs go through all the data
    cases = [(strategy, warning) for strategy in ("ddp", "fsdp") for warning in OF_WRONG_LENGTH]
    for (_, warning), first, second in zip(cases, *on_ranks(each, 2, _warned, *cases, timeout=120), strict=True):
        assert [warning in text for text in first] == [True] * 2, first
        assert second == []


def _set_in_a_validation() -> torch.Tensor:
    module, strategy = Centring(), DDPStrategy(broadcast_buffers=False)
    callback = LambdaCallback(on_validation_start=lambda trainer, module: module.mean.fill_(3.0))
    trained(module, loader(28, 2), loader(4, 1), strategy=strategy, callbacks=callback, val_check_interval=7)
    return module.at_the_end


def test_buffers_that_a_hook_of_validation_writes_persist() -> None:  # I-13
    for mean in on_ranks(_set_in_a_validation, 2):
        assert torch.equal(mean, torch.full((FEATURES,), 3.0))


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
        whole = DataLoader(Lines(), batch_size=4)
        quiet(strategy="ddp", max_epochs=2).fit(Recording(), whole, whole)
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
