"""Runs on ranks that resume, bit for bit on as many, or that a signal ends (Q-06, J-09, I-05). See the programs too."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from small_runs import FEATURES, STRATEGIES, Regression, SaveAt, data, each, failing, loader, quiet, trained, weights
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import DataModule
from drivetrain.callbacks import Checkpoint, LambdaCallback
from drivetrain.testing import run_distributed
from worlds import on_ranks

SAMPLES = 53


class Augmented(Dataset[Any]):
    """Draws random numbers when it is read; the first number of a sample is its index."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.rand(FEATURES) + random.random()])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        rank = dist.get_rank()
        for index in torch.randperm(20 + 9 * rank).tolist():
            yield torch.cat([torch.tensor([float(index + 100 * rank)]), torch.rand(FEATURES)])


class Drawing(Regression):
    """Uses dropout, weights of micro-batches that only their rank knows, and values logged over the epoch."""

    def __init__(self, weighs: bool = False) -> None:
        super().__init__()
        self.net.insert(1, nn.Dropout(0.2))
        self.mean = torchmetrics.MeanMetric()
        self.seen: list[tuple[int, int]] = []
        self.losses: list[float] = []
        if weighs:
            self.batch_weight = lambda batch: float(batch[:, 0].sum()) + 1  # type: ignore[method-assign]

    def loss(self, batch: Any) -> torch.Tensor:
        return (self.net(batch[:, 1:]) - 0.01 * batch[:, :1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if not self.trainer.joining:
            self.seen += [(self.current_epoch, int(number)) for number in batch[:, 0]]
            self.losses.append(loss.item())
        self.mean.update(loss.detach())
        self.log("loss", loss, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _fit(folder: Path, strategy: str, start: Path | None, kind: str, batch_size: int = 3, **options: Any) -> Any:
    module = Drawing(weighs=kind == "weighed")
    samples: Any = Stream() if kind == "stream" else Augmented()
    sampling: dict[str, Any] = (
        {} if kind == "stream" else {"shuffle": True, "num_workers": 2 if kind == "workers" else 0}
    )
    saver = Checkpoint(folder, every_n_train_steps=1, save_top_k=-1, save_async=options.pop("in_background", False))
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2, "seed": 3, "default_root_dir": folder, **options}
    trainer = quiet(strategy=STRATEGIES[strategy](), callbacks=saver, **settings)
    trainer.fit(module, DataLoader(samples, batch_size, **sampling), ckpt_path=start)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return weights(module), module.losses, module.seen, metrics, trainer.samples_seen


STOPS = ["epoch=0-step=4", "epoch=1-step=7"]


def _whole_and_resumed(folder: Path, strategy: str, kind: str, in_background: bool) -> Any:
    whole = _fit(folder / "whole", strategy, None, kind, in_background=in_background)
    return whole, [_fit(folder / f"from {stop}", strategy, folder / "whole" / stop, kind) for stop in STOPS]


@pytest.mark.parametrize(
    ("strategy", "kind", "in_background"),
    [
        ("ddp", "weighed", True),
        ("ddp", "stream", False),
        ("ddp", "workers", False),
        ("fsdp", "weighed", True),
        ("zero 1", "dealt", True),
        ("zero 3", "dealt", False),
    ],
)
def test_a_run_resumes_bit_for_bit_on_as_many_ranks(
    strategy: str, kind: str, in_background: bool, tmp_path: Path
) -> None:  # F-02, F-08, B-10, B-18: also with prefetched batches and asynchronous saves
    for rank, (whole, resumed) in enumerate(on_ranks(_whole_and_resumed, 2, tmp_path, strategy, kind, in_background)):
        for stop, found in zip(STOPS, resumed, strict=True):
            for resumed_values, values in zip(found[1:3], whole[1:3], strict=True):
                assert resumed_values == values[-len(resumed_values) :], (rank, stop)
            assert torch.equal(found[0], whole[0]), (rank, stop)
            assert found[3:] == whole[3:], (rank, stop)


def _once(folder: Path, start: Path | None, batch_size: int, max_steps: int = -1) -> Any:
    options = {} if max_steps < 0 else {"max_steps": max_steps, "max_epochs": -1}
    return _fit(folder, "ddp", start, "dealt", batch_size, **options)


def test_on_other_numbers_of_ranks_every_sample_is_used_once_per_epoch(tmp_path: Path) -> None:
    # F-02: 2 x 3, then 4 x 2, then 3 x 4, stopping in the middle of an epoch each time
    first = on_ranks(_once, 2, tmp_path / "a", None, 3, 2)
    second = on_ranks(_once, 4, tmp_path / "b", tmp_path / "a" / "epoch=0-step=2", 2, 3)
    resumed_and_whole = (tmp_path / "c", tmp_path / "b" / "epoch=0-step=3", 4), (tmp_path / "d", None, 4)
    third, whole = zip(*on_ranks(each, 3, _once, *resumed_and_whole), strict=True)
    seen = [sample for run in (*first, *second, *third) for sample in run[2]]
    assert sorted(seen) == [(epoch, sample) for epoch in range(2) for sample in range(SAMPLES)]
    assert {run[4] for run in third} == {2 * SAMPLES}
    # The second epoch is a regular one, in its usual order.
    for found, expected in zip(third, whole, strict=True):
        assert [sample for sample in found[2] if sample[0] == 1] == [sample for sample in expected[2] if sample[0] == 1]
    # An epoch's mean is over all of its samples, regardless of their ranks.
    assert third[0][3]["loss_epoch"] == pytest.approx(third[0][3]["mean"], rel=0.2)


def _save_after(strategy: str, folder: str) -> tuple[torch.Tensor, str]:
    within = f"{folder}/within"
    saves = LambdaCallback(on_train_end=lambda trainer, module: trainer.save_checkpoint(within))
    module, trainer = Regression(), quiet(strategy=strategy, callbacks=saves)
    trainer.fit(module, loader(32, 4))
    found = weights(module)
    with failing() as refused:
        trainer.save_checkpoint(f"{folder}/whole")
    trainer.save_checkpoint(f"{folder}/weights", weights_only=True)
    trained(Regression(), loader(32, 4), strategy=strategy, max_epochs=2, ckpt_path=within)
    return found, refused["text"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_3"])
def test_a_save_after_a_run_of_two_ranks_names_the_way_out(strategy: str, tmp_path: Path) -> None:  # S-01
    for found, refused in on_ranks(_save_after, 2, strategy, str(tmp_path)):
        assert "needs the state of every rank" in refused
        assert "on_train_end, or with weights_only=True" in refused
        again = Regression.load_from_checkpoint(tmp_path / "weights")
        torch.testing.assert_close(weights(again), found)
    assert not (tmp_path / "whole").exists()


class Growing(DataModule):
    def train_dataloader(self) -> Any:
        return loader(30, 2 + self.trainer.current_epoch, shuffle=True)


class Watching(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(torch.nn.Dropout(0.2))
        self.seen: dict[int, list[list[float]]] = {0: [], 1: [], 2: []}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.trainer.joining:
            self.seen[self.current_epoch].append(batch[0][:, 0].tolist())
        return super().training_step(batch, batch_idx)


def fit_reloading(strategy: str, path: str | None = None, callbacks: Any = ()) -> Watching:
    module, options = Watching(), {"max_epochs": 3, "seed": 4, "reload_dataloaders_every_n_epochs": 1}
    run = quiet(strategy=strategy, callbacks=[*callbacks], **options)
    run.fit(module, datamodule=Growing(), ckpt_path=path)
    return module


def _reloading_and_resumed(path: str, strategy: str) -> Any:
    whole, resumed = fit_reloading(strategy, callbacks=[SaveAt(11, path)]), fit_reloading(strategy, path)
    return weights(whole), weights(resumed), whole.seen, resumed.seen


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_reloaded_loaders_resume_with_the_remaining_samples(strategy: str, tmp_path: Path) -> None:  # L-07
    path = str(tmp_path / "saved")
    ranks = on_ranks(_reloading_and_resumed, 2, path, strategy, process_group=None, timeout=100)
    for whole, resumed, seen, seen_after in ranks:
        assert torch.equal(whole, resumed)
        assert seen_after == {0: [], 1: seen[1][3:], 2: seen[2]}
        assert [len(samples) for samples in seen[1]][:-1] == [3] * 4
    alone = fit_reloading("single_device", path).seen  # on fewer ranks
    before = chain.from_iterable(samples for rank in ranks for samples in rank[2][1][:3])
    assert sorted([*before, *chain.from_iterable(alone[1])]) == sorted(data(30).tensors[0][:, 0].tolist())
    assert {len(samples) for samples in alone[1]} == {3}
    # The last epoch is the one that it would have been without the resume.
    together = chain.from_iterable(zip(*(rank[2][2] for rank in ranks), strict=True))
    assert [*chain.from_iterable(alone[2])] == [*chain.from_iterable(together)]


FAST = 40  # micro-batches before the signal, which take about a millisecond each
SLOW = 0.8  # seconds of each micro-batch from the signal on
MOST = 3  # the micro-batches that begin within two seconds of the signal, and one more
ENV = {"DRIVETRAIN_PREEMPTION_SIGNALS": "SIGUSR1"}
LEFT = (128 + signal.SIGUSR1, "interrupted")


class Slowing(Regression):
    """Is fast until rank 1 is signalled in ``stage``, then slow. Counts the micro-batches that begin afterwards."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage
        self.after = 0

    def run_step(self, stage: str, batch: Any, batch_idx: int) -> torch.Tensor:
        if stage == self.stage and batch_idx >= FAST:
            self.after += 1
            if batch_idx == FAST and self.global_rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(SLOW)
        return self.loss(batch)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.run_step("fit", batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.run_step("validate", batch, batch_idx))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.run_step("test", batch, batch_idx))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.run_step("predict", batch, batch_idx)


def run_until_left(run: Any, entry: str, *given: Any, **options: Any) -> tuple[Any, str]:
    """Return the exit code of a run that is signalled, and its state."""
    code: Any = None
    try:
        getattr(run, entry)(*given, **options)
    except SystemExit as error:
        code = error.code
    return code, run.state


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("fit", "validate", {"limit_train_batches": 2}),
    ("predict", "predict", {}),
    ("fit", "fit", {}),
    ("fit", "fit", {"accumulate_grad_batches": 64}),
    ("test", "test", {}),
]


def _slowing(name: str, cases: list[Any]) -> list[Any]:
    found = []
    for entry, stage, options in cases:
        module, run = Slowing(stage), quiet(strategy=STRATEGIES[name](), **options)
        loaders = (loader(140, 1),) * (2 if entry == "fit" else 1)
        found.append((run_until_left(run, entry, module, *loaders), module.after))
    return found


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero 3"])
def test_a_signal_is_heard_when_fast_micro_batches_become_slow(name: str) -> None:
    cases = CASES if name == "ddp" else CASES[:2]
    by_rank = run_distributed(_slowing, 2, name, cases, process_group=None, env=ENV, timeout=150)
    for case, first, second in zip(cases, *by_rank, strict=True):
        assert first == second, case  # the ranks leave after the same micro-batch
        assert first[0] == LEFT, case
        assert 1 <= first[1] <= MOST, (case, first)


class Apart(Slowing):
    """Rank 0 is ``far`` micro-batches ahead of the others when a rank is signalled, or has no data left."""

    def __init__(self, signalled: int, far: int, pids: list[int]) -> None:
        super().__init__("none")
        self.signalled, self.far, self.pids = signalled, far, pids

    def run_step(self, stage: str, batch: Any, batch_idx: int) -> torch.Tensor:
        self.after += 1
        if self.global_rank and batch_idx == 2:
            time.sleep(1)  # rank 0 gets ahead
            if self.global_rank == 1:
                os.kill(self.pids[self.signalled], signal.SIGUSR1)
        if batch_idx >= (2 if self.global_rank else self.far):
            time.sleep(SLOW)
        return self.loss(batch)


class Paired(Slowing):
    """Ranks 1 and 2 meet in each micro-batch, in a process group of their own. Rank 0 is far ahead of them."""

    def on_validation_start(self) -> None:
        self.pair = dist.new_group([1, 2], backend="gloo")

    def run_step(self, stage: str, batch: Any, batch_idx: int) -> torch.Tensor:
        self.after += 1
        if self.global_rank:
            dist.all_reduce(torch.ones(1), group=self.pair)
        if self.global_rank == 1:
            time.sleep(0.05)  # rank 2 is in the next collective meanwhile
        if self.global_rank == 0 and batch_idx == FAST:
            os.kill(os.getpid(), signal.SIGUSR1)
        return self.loss(batch)


APART = [("validate", 1, 40), ("predict", 0, 40), ("test", 1, 1000)]


def _apart() -> list[Any]:
    pids: list[Any] = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    found: list[Any] = []
    modules: list[tuple[str, Slowing]] = [(entry, Apart(signalled, far, pids)) for entry, signalled, far in APART]
    for entry, module in [*modules, ("validate", Paired("validate"))]:
        found.append((run_until_left(quiet(strategy="ddp"), entry, module, loader(210, 1)), module.after))
    return found


def test_ranks_that_are_many_micro_batches_apart_leave_together() -> None:
    (*ahead, _), (*behind, first), (*others, second) = run_distributed(_apart, 3, env=ENV, timeout=120)
    for case, far, *near in zip(APART, ahead, behind, others, strict=True):
        assert far[0] == LEFT, case
        assert far[1] >= min(case[2], 70), (case, far)
        for one in near:
            assert one[0] == LEFT, case
            assert one[1] <= 2 + MOST, (case, one)
    # Ranks with collectives of their own leave after the same micro-batch.
    assert first == second
    assert first[0] == LEFT


class UnevenStream(IterableDataset[Any]):
    """Rank 1 has ``more`` times as much data on top of that of rank 0."""

    def __init__(self, more: int) -> None:
        self.more = more

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank = int(os.environ["RANK"])
        return (torch.full((FEATURES + 1,), index + 0.5 * rank) for index in range(20 * (1 + self.more * rank)))


class Changing(Drawing):
    """Has state that differs between ranks; rank 1 is signalled at a moment; validation steps may use a collective."""

    batches: torch.Tensor

    def __init__(self, moment: tuple[Any, ...] | None, meets: bool) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros(()))
        self.moment, self.meets = moment, meets
        self.validated: list[Any] = []

    def signal_at(self, *moment: Any) -> None:
        if moment == self.moment and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches += 1 + self.global_rank  # differs between ranks
        loss = super().training_step(batch, batch_idx)
        self.signal_at("train", self.current_epoch, batch_idx)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        if self.meets:
            dist.all_reduce(loss.clone())
        self.log("val_loss", loss)
        self.signal_at("validate", self.current_epoch, batch_idx)

    def on_validation_end(self) -> None:
        self.validated.append((self.global_step, self.trainer.batch_idx))


def train(folder: Path, name: str, validation: Dataset[Any], module: Changing, **options: Any) -> Any:
    """Return the exit code, and everything that the run arrives at."""
    settings = {"enable_checkpointing": True, "max_epochs": 2, "seed": 3, "accumulate_grad_batches": 8, **options}
    saver = Checkpoint(folder, every_n_train_steps=1000)
    fit = quiet(strategy=STRATEGIES[name](), callbacks=saver, default_root_dir=folder, **settings)
    loaders = DataLoader(AUGMENTED, batch_size=2, shuffle=True), DataLoader(validation, batch_size=2)
    code, _ = run_until_left(fit, "fit", module, *loaders, ckpt_path="auto")
    state = {name: value.tolist() for name, value in module.state_dict().items()}
    metrics = {name: float(value) for name, value in fit.callback_metrics.items()}
    return code, (state, metrics, fit.global_step, fit.samples_seen, fit.micro_batches)


UNEVEN, EVEN = UnevenStream(1), UnevenStream(0)
AUGMENTED = Augmented(61)  # not divisible by two ranks, batches of two or windows of eight
WITHIN_WINDOWS = {"val_check_interval": 5, "check_val_every_n_epoch": None}
# Rank 0 may have reached the end of the window: without a preceding collective it need not wait for rank 1.
MOMENTS: list[Any] = [
    (("train", 0, 12), AUGMENTED, WITHIN_WINDOWS, {1, 2}),
    (("validate", 0, 3), AUGMENTED, WITHIN_WINDOWS, {0, 1}),
    (("validate", 0, 15), UNEVEN, {}, {2}),  # after rank 0 has finished
    (("validate", 0, 4), EVEN, {}, {2}),
    (("train", 1, 1), AUGMENTED, {}, {2, 3}),
    (("validate", 0, 1), UNEVEN, {}, {2}),
]


def _leave_and_resume(folder: Path, name: str, cases: list[Any]) -> list[Any]:
    found: list[Any] = []
    undisturbed: dict[str, Any] = {}
    for number, (moment, validation, options, _) in enumerate(cases):
        left, more = folder / str(number), getattr(validation, "more", None)
        kind = f"{more} {options}"
        if kind not in undisturbed:
            module = Changing(None, more == 0)
            result = train(folder / f"whole {number}", name, validation, module, **options)
            undisturbed[kind] = result, module.validated
        leaving, resumed = Changing(moment, more == 0), Changing(None, more == 0)
        code, _ = train(left, name, validation, leaving, **options)
        saved = [one.name for one in left.iterdir() if "step=" in one.name]
        result = train(left, name, validation, resumed, **options)
        found.append((code, saved, (result, leaving.validated + resumed.validated) == undisturbed[kind]))
    return found


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero 3"])
def test_a_signal_within_a_window_or_a_validation_loses_nothing(tmp_path: Path, name: str) -> None:  # J-09
    cases = MOMENTS if name == "ddp" else MOMENTS[:3]
    arguments = (tmp_path, name, cases)
    for found in run_distributed(_leave_and_resume, 2, *arguments, process_group=None, env=ENV, timeout=120):
        for (moment, _, _, steps), (code, saved, equal) in zip(cases, found, strict=True):
            assert code == LEFT[0], moment
            assert saved in [[f"interrupted-step={step}"] for step in steps], (moment, saved)
            assert equal, moment


class StopsBeforeLeaving(Changing):
    """Rank 1 requests a stop after its second micro-batch. The ranks are never more than a micro-batch apart."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.strategy.barrier()
        time.sleep(0.1 if batch_idx > 2 else 0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.moment is not None and (self.global_rank, batch_idx) == (1, 1):
            self.trainer.should_stop = True


def _stop_and_leave(folder: Path) -> tuple[Any, ...]:
    window = {"accumulate_grad_batches": 16}  # an epoch
    code, _ = train(folder, "ddp", AUGMENTED, StopsBeforeLeaving(("train", 0, 2), False), **window)
    saved = [one.name for one in folder.iterdir() if "step=" in one.name]
    _, (_, _, steps, _, _) = train(folder, "ddp", AUGMENTED, StopsBeforeLeaving(None, False), **window)
    return code, saved, steps


def test_a_stop_that_one_rank_requested_before_a_signal_ends_the_resumed_run(tmp_path: Path) -> None:  # J-09
    for found in on_ranks(_stop_and_leave, 2, tmp_path, process_group=None, env=ENV):
        assert found == (LEFT[0], ["interrupted-step=0"], 1)  # of two steps


class StopsWithoutSteps(Regression):
    """Makes no step; rank 1 requests a stop after its tenth micro-batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def batch_weight(self, batch: Any) -> float:
        return 0.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx, self.global_rank, self.how) == (9, 1, "should_stop"):
            self.trainer.should_stop = True
        elif (batch_idx, self.global_rank, self.how) == (9, 1, "signal"):
            os.kill(os.getpid(), signal.SIGTERM)


def _stopped(strategy: str, how: str) -> tuple[Any, ...]:
    run = quiet(strategy=strategy, max_time={"seconds": 0.1} if how == "max_time" else None, max_epochs=200)
    code, _ = run_until_left(run, "fit", StopsWithoutSteps(how), loader(600, 1))
    return code, run.global_step, run.micro_batches, run.current_epoch


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_that_make_no_step_end_after_the_same_window(strategy: str) -> None:  # I-05
    ways = ("should_stop", "signal", "max_time")
    first, second = on_ranks(each, 2, _stopped, *[(strategy, how) for how in ways])
    assert first == second
    for how, (code, steps, micro_batches, epochs) in zip(ways, first, strict=True):
        assert (code, steps) == (128 + signal.SIGTERM if how == "signal" else None, 0)
        assert 10 <= micro_batches < 300 or how == "max_time"
        assert epochs < 200
