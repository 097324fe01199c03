"""Logged values on several ranks are exact, whatever happens to them or to a metric object later (I-01)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from small_runs import Regression, data, failing, loader, quiet
from torch.utils.data import DataLoader

from drivetrain_strategies import DDPStrategy, FSDPStrategy
from worlds import on_ranks

BIG = 2**24 + 1  # the first integer that float32 cannot represent


class Measured(Regression):
    """Resets its metric object by hand in the epoch's last hook, as code that computes it by hand does."""

    def __init__(self, in_step: bool, reuse: bool) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.in_step, self.reuse = in_step, reuse

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.validation_step(batch, batch_idx)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(batch[0][:, 0])
        if self.in_step:
            self.log("mean", self.mean, on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        if not self.in_step:
            self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.mean.reset()
        if self.reuse:
            self.mean.update(100.0)

    on_validation_epoch_end = on_train_epoch_end


def _reset(in_step: bool, reuse: bool, samples: int) -> tuple[Any, Any]:
    trainer, module = quiet(strategy=DDPStrategy()), Measured(in_step, reuse)
    validated = trainer.validate(module, loader(samples, 1), verbose=False)
    trainer.fit(module, loader(samples, 1))
    return validated, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("samples", [1, 5])  # with one sample, the second rank has none
@pytest.mark.parametrize(("in_step", "reuse"), [(True, False), (True, True), (False, False), (False, True)])
def test_a_metric_that_a_hook_resets_keeps_what_was_logged(in_step: bool, reuse: bool, samples: int) -> None:
    # I-01
    expected = pytest.approx(float(data(samples).tensors[0][:, 0].mean()), rel=1e-6)
    for validated, trained in on_ranks(_reset, 2, in_step, reuse, samples):
        assert validated == [{"mean": expected}]
        assert trained == {"mean": expected}


class Counting(Regression):
    """Logs values that float32 cannot represent, with weights of every kind."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        options: dict[str, Any] = {"on_step": False, "on_epoch": True}
        self.log("sum", torch.tensor(BIG), reduce_fx="sum", batch_size=0, **options)
        self.log("max", BIG, reduce_fx="max", batch_size=0, **options)
        self.log("mean", float(BIG), **options)
        size: Any = torch.tensor(len(batch[0]))
        self.log("first", batch[0][:, 0].mean(), batch_size=size, **options)
        self.log("step", float(BIG), sync_dist=True)
        self.log("ce", loss, on_step=True, on_epoch=True)
        loss += 100.0
        return loss


def _counted() -> tuple[dict[str, float], list[float]]:
    module, losses = Counting(), []
    plain = module.loss
    module.loss = lambda batch: losses.append(plain(batch)) or losses[-1]  # type: ignore[method-assign,func-returns-value]
    trainer = quiet(strategy=DDPStrategy(), log_every_n_steps=1)
    trainer.fit(module, loader(8, 2))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, [float(each) for each in losses]


def test_large_integers_and_later_changes() -> None:
    # I-01
    first, second = on_ranks(_counted, 2)
    found = first[0]
    assert (found["sum"], found["max"], found["mean"], found["step"]) == (4 * BIG, BIG, BIG, BIG)
    assert found["first"] == pytest.approx(float(data(8).tensors[0][:, 0].mean()), rel=1e-6)
    before = [changed - 100 for changed in (*first[1], *second[1])]
    assert found["ce_epoch"] == pytest.approx(sum(before) / 4, abs=1e-4)
    assert found["ce_step"] == pytest.approx(first[1][-1] - 100, abs=1e-4)


class Scaled(Regression):
    """Logs a parameter of one element, while it is whole or while it is sharded."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([0.5]))
        self.seen: list[float] = []
        self.hook = hook

    def _log(self) -> None:
        self.seen.append(float(self.scale.full_tensor() if hasattr(self.scale, "full_tensor") else self.scale))
        self.log("scale", self.scale, on_step=True, on_epoch=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.hook == "step":
            self._log()
        return self.loss(batch) * self.scale.square().sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.hook == "end":
            self._log()


def _scaled(hook: str, folder: Path) -> tuple[dict[str, str], list[float], dict[str, float]]:
    module, trainer = Scaled(hook), quiet(strategy=FSDPStrategy(), log_every_n_steps=1, default_root_dir=folder)
    with failing() as caught:
        trainer.fit(module, DataLoader(data(8), 2))
    return caught, module.seen, {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_a_parameter_of_one_element_under_fsdp(tmp_path: Path) -> None:
    # I-01: it is whole within the step, and its storage is freed afterwards
    for _, seen, found in on_ranks(_scaled, 2, "step", tmp_path):
        assert len(seen) == 2
        assert seen[0] != seen[1]
        assert found["scale_epoch"] == pytest.approx(sum(seen) / 2, rel=1e-6)
        assert found["scale_step"] == seen[-1]


def test_a_shard_of_one_element_is_refused(tmp_path: Path) -> None:
    # I-01, H-03: only one rank has it, and log does not communicate
    for caught, _, _ in on_ranks(_scaled, 2, "end", tmp_path):
        assert caught["type"] == "ConfigurationError"
        assert "log('scale') was given a DTensor" in caught["text"]
        assert "full_tensor()" in caught["text"]


class Apart(torchmetrics.Metric):
    """Keeps a list whose elements torchmetrics gathers one by one."""

    values: list[torch.Tensor]
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx=None)

    def update(self, value: torch.Tensor) -> None:
        self.values.append(value)

    def compute(self) -> torch.Tensor:
        return torch.cat([value.reshape(-1) for value in self.values]).mean()


class MeasuredApart(Regression):
    def __init__(self, everywhere: bool) -> None:
        super().__init__()
        self.apart = Apart()
        self.everywhere = everywhere

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.everywhere or self.global_rank == 0:
            self.apart.update(batch[0][:, 0])
        self.log("apart", self.apart)


def _validate_apart(everywhere: bool) -> dict[str, str]:
    with failing() as found:
        quiet(strategy="ddp").validate(MeasuredApart(everywhere), loader(8, 2), verbose=False)
    return found


def test_a_list_of_states_that_one_rank_never_updated_is_refused_by_name() -> None:
    # S-06: a wait of step_timeout before
    assert [found["type"] for found in on_ranks(_validate_apart, 2, True)] == ["nothing was raised"] * 2
    for found in on_ranks(_validate_apart, 2, False):
        assert found["type"] == "ConfigurationError"
        assert "state 'values' of the Apart 'apart'" in found["text"]
        assert "2, 0" in found["text"]


class WithoutTargets(Regression):
    """The second rank has no targets, so its mean is NaN."""

    def __init__(self, as_tensor: bool) -> None:
        super().__init__()
        self.as_tensor = as_tensor

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        value, count = (3.0, 2) if self.global_rank == 0 else (float("nan"), 0)
        weight: Any = torch.tensor(count) if self.as_tensor else count
        self.log("value", torch.tensor(value), on_step=True, on_epoch=True, sync_dist=True, batch_size=weight)
        return super().training_step(batch, batch_idx)


def _train_without_targets() -> list[dict[str, float]]:
    found = []
    for as_tensor in (False, True):
        runner = quiet(strategy="ddp", max_epochs=1, log_every_n_steps=1)
        runner.fit(WithoutTargets(as_tensor), loader(8, 2))
        found.append({name: float(value) for name, value in runner.callback_metrics.items() if "value" in name})
    return found


def test_a_rank_without_weight_does_not_enter_step_values_nor_epoch_values() -> None:
    # S-06
    expected = {"value_step": 3.0, "value_epoch": 3.0, "value": 3.0}
    assert on_ranks(_train_without_targets, 2) == [[expected] * 2] * 2
