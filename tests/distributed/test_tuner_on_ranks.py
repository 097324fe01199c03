"""The tuner on two ranks: both get the same result, and the run afterwards is not affected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import Regression, failing, loader, quiet, weights
from torch import nn

from drivetrain.callbacks import LearningRateFinder
from drivetrain.testing import requires_package
from drivetrain.tuner import Tuner
from worlds import DEEPSPEED, on_ranks, preload

preload(*DEEPSPEED)


class Drawing(Regression):
    """Uses random generators in each step, and has buffers."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.net.append(nn.BatchNorm1d(1))
        self.net.insert(1, nn.Dropout(0.3))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Hungry(Regression):
    """Runs out of memory above a batch size that differs between ranks."""

    def __init__(self, *most: int) -> None:
        super().__init__()
        self.most = most
        self.batch_size = 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) > self.most[self.trainer.global_rank]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", self.loss(batch))


def _trained(strategy: str, find: bool) -> dict[str, Any]:
    torch.manual_seed(7)
    module = Drawing()
    fit = quiet(strategy=strategy, max_epochs=2)
    data = loader(46, 3, shuffle=True)
    found = None
    if find:
        found = Tuner(fit).lr_find(module, data, num_training=12, update_attr=False).results
        assert Tuner(fit).scale_batch_size(module, data, init_val=2, max_trials=2) == 4
    fit.fit(module, data)
    return {
        "found": found,
        "weights": weights(module),
        "buffers": [one.clone() for one in module.buffers()],
        "losses": module.losses,
        "metrics": {name: float(one) for name, one in fit.callback_metrics.items()},
        "draws": torch.rand(3),
        "counters": (fit.global_step, fit.current_epoch, fit.samples_seen, fit.micro_batches),
        "rates": [one.get_last_lr() for one in fit.lr_schedulers],
    }


def _both(*strategies: str) -> list[Any]:
    return [(_trained(one, find=False), _trained(one, find=True)) for one in strategies]


def _assert_alike(strategy: str, plain: dict[str, Any], after: dict[str, Any]) -> None:
    for name, value in plain.items():
        if name != "found":
            torch.testing.assert_close(after[name], value, rtol=0, atol=0, msg=f"{strategy}: {name} differs")


@pytest.mark.parametrize(
    "strategies",
    [
        ("ddp", "fsdp"),
        pytest.param(
            ("deepspeed_stage_2", "deepspeed_stage_3"), marks=[requires_package("deepspeed"), pytest.mark.slow]
        ),
    ],
)
def test_a_run_after_a_search_is_the_run_without_one(strategies: tuple[str, ...]) -> None:  # L-06
    ranks = on_ranks(_both, 2, *strategies, process_group=None, timeout=150)
    for number, strategy in enumerate(strategies):
        for plain, after in (rank[number] for rank in ranks):
            _assert_alike(strategy, plain, after)
        first, second = (rank[number][1]["found"] for rank in ranks)
        assert first == second
        assert len(first["loss"]) == 12


def _sizes() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        module, fit = Hungry(64, 11), quiet(strategy=strategy)
        found[strategy] = Tuner(fit).scale_batch_size(module, loader(200, 4), mode="binsearch", steps_per_trial=2)
        assert module.batch_size == found[strategy]
    with failing() as caught:
        Tuner(quiet(strategy="ddp")).scale_batch_size(Hungry(64, 0), loader(200, 4))
    found["nothing fits"] = caught
    few = Tuner(quiet(strategy="ddp")).scale_batch_size(Hungry(64, 64), dataloaders=loader(1, 4), method="validate")
    found["one sample"] = few
    found["all the data"] = Tuner(quiet(strategy="ddp")).scale_batch_size(Hungry(64, 64), loader(21, 4))
    return found


def test_the_batch_size_fits_on_every_rank() -> None:  # L-06
    first, second = on_ranks(_sizes, 2, process_group=None, timeout=150)
    assert first["ddp"] == second["ddp"] == 11
    assert first["fsdp"] == second["fsdp"] == 11
    assert first["one sample"] == second["one sample"] == 1
    assert first["all the data"] == second["all the data"] == 11
    for rank in (first, second):
        assert rank["nothing fits"]["type"] == "ConfigurationError"
        assert "batch size 1 " in rank["nothing fits"]["text"]


def _losses(batch_size: int) -> list[float]:
    options: dict[str, Any] = {"min_lr": 1e-3, "max_lr": 0.1, "num_training": 11, "update_attr": False}
    return Tuner(quiet(strategy="auto")).lr_find(Regression(), loader(42, batch_size), **options).results["loss"]


def test_the_losses_are_over_the_samples_of_all_ranks() -> None:  # L-06
    first, second = on_ranks(_losses, 2, 4, process_group=None, timeout=60)
    assert first == second
    assert first == pytest.approx(_losses(8), rel=1e-5)


class Failing(Regression):
    """Raises in its seventh step on rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 6 and self.trainer.global_rank == 1:
            raise RuntimeError("a broken sample")
        return super().training_step(batch, batch_idx)


def _failing() -> Any:
    module = Failing()
    before = weights(module).clone()
    with failing() as caught:
        Tuner(quiet(strategy="ddp")).lr_find(module, loader(64, 4))
    finder = LearningRateFinder(num_training_steps=15)
    sound = Regression()
    quiet(strategy="ddp", callbacks=[finder]).fit(sound, loader(64, 4))
    return caught, torch.equal(before, weights(module)), sound.lr, finder.optimal_lr


def test_an_error_on_one_rank_fails_on_all_and_leaves_nothing() -> None:  # L-06
    first, second = on_ranks(_failing, 2, process_group=None, timeout=100)
    for caught, same, _, _ in (first, second):
        assert "a broken sample" in caught["text"]
        assert same
    assert first[2] == second[2] == first[3].suggestion()


@pytest.mark.slow
def test_started_processes_return_the_result_of_a_search() -> None:  # L-06
    fit = quiet(strategy="ddp", devices=2, launcher="forkserver")
    module = Hungry(64, 5)
    before = weights(module).clone()
    found = Tuner(fit).lr_find(module, loader(64, 4), num_training=15)
    assert len(found.results["loss"]) == 15
    assert module.lr == found.suggestion()
    assert torch.equal(before, weights(module))
    assert Tuner(fit).scale_batch_size(module, loader(64, 4), init_val=4, max_trials=2) == 4
    assert module.batch_size == 4
