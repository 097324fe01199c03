"""Logged values and metrics on several ranks are exact, also after a resume on fewer ranks. Rows I-01, I-16, S-06.

Large integers, values that change later, and a parameter of one element are in test_programs_on_ranks.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from small_runs import Regression, data, failing, loader, quiet, refusal, weights

from drivetrain.callbacks import Checkpoint
from mergeable import MergeablePearson
from worlds import on_ranks


class ResetsByHand(Regression):
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


def _reset(in_step: bool, reuse: bool) -> list[Any]:
    found = []
    for samples in (1, 5):  # with one sample, the second rank has none
        trainer, module = quiet(strategy="ddp"), ResetsByHand(in_step, reuse)
        found.append(trainer.validate(module, loader(samples, 1), verbose=False))
        trainer.fit(module, loader(samples, 1))
        found.append([{name: float(value) for name, value in trainer.callback_metrics.items()}])
    return found


@pytest.mark.parametrize(("in_step", "reuse"), [(True, False), (True, True), (False, True)])
def test_a_metric_that_a_hook_resets_keeps_what_was_logged(in_step: bool, reuse: bool) -> None:  # I-01
    one, five = (pytest.approx(float(data(samples).tensors[0][:, 0].mean()), rel=1e-6) for samples in (1, 5))
    for found in on_ranks(_reset, 2, in_step, reuse):
        assert found == [[{"mean": one}]] * 2 + [[{"mean": five}]] * 2


class LogsAShard(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([0.5]))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * self.scale.square().sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("scale", self.scale)


def _log_a_shard(folder: Path) -> str:
    return refusal(LogsAShard(), loader(8, 2), strategy="fsdp", default_root_dir=folder)


def test_a_shard_of_one_element_is_refused(tmp_path: Path) -> None:
    # I-01, H-03: only one rank has it, and log does not communicate
    for text in on_ranks(_log_a_shard, 2, tmp_path):
        assert text.startswith("ConfigurationError")
        assert "log('scale') was given a DTensor" in text
        assert "full_tensor()" in text


class ListOfStates(torchmetrics.Metric):
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


class UpdatedOnRank0(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.states = ListOfStates()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.states.update(batch[0][:, 0])
        self.log("states", self.states)


def _validate() -> dict[str, str]:
    with failing() as found:
        quiet(strategy="ddp").validate(UpdatedOnRank0(), loader(8, 2), verbose=False)
    return found


def test_a_list_of_states_that_one_rank_never_updated_is_refused_by_name() -> None:
    # S-06: a wait of step_timeout before
    for found in on_ranks(_validate, 2):
        assert found["type"] == "ConfigurationError"
        assert "state 'values' of the ListOfStates 'states'" in found["text"]
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


def _train_without_targets(as_tensor: bool) -> dict[str, float]:
    runner = quiet(strategy="ddp", log_every_n_steps=1)
    runner.fit(WithoutTargets(as_tensor), loader(8, 2))
    return {name: float(value) for name, value in runner.callback_metrics.items() if "value" in name}


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_rank_without_weight_does_not_enter_step_values_nor_epoch_values(as_tensor: bool) -> None:  # S-06
    assert on_ranks(_train_without_targets, 2, as_tensor) == [{"value_step": 3.0, "value_epoch": 3.0, "value": 3.0}] * 2


SAMPLES = 24


class Correlated(Regression):
    """Measures the correlation of the data's first number with the target: the same for any split and order."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.pearson = kind()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.pearson.update(batch[0][:, 0], batch[1][:, 0])
        self.log("pearson", self.pearson, on_step=False, on_epoch=True)
        return self.loss(batch)


def _run(kind: Any, folder: Path, start: Path | None, max_steps: int) -> Any:
    saver = Checkpoint(folder, every_n_train_steps=1, save_top_k=-1)
    options = {"max_steps": max_steps, "default_root_dir": folder, "seed": 3}
    module, trainer = Correlated(kind), quiet(strategy="ddp", callbacks=saver, **options)
    before = weights(module).clone()
    with failing() as caught:
        trainer.fit(module, loader(SAMPLES, 2, shuffle=True), ckpt_path=start)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return caught, found, torch.equal(before, weights(module))


SAVED = "epoch=0-step=2"


def assert_resumed(runs: list[Any]) -> None:
    x, y = data(SAMPLES).tensors
    expected = float(torch.corrcoef(torch.stack([x[:, 0], y[:, 0]]))[0, 1])
    for caught, found, _ in runs:
        assert caught["type"] == "nothing was raised", caught
        assert found["pearson"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (3, 2)])
def test_a_mergeable_metric_resumes(before: int, after: int, tmp_path: Path) -> None:  # I-16
    on_ranks(_run, before, MergeablePearson, tmp_path / "a", None, 2)
    assert_resumed(on_ranks(_run, after, MergeablePearson, tmp_path / "b", tmp_path / "a" / SAVED, -1))


def test_an_unmergeable_metric_is_refused_on_every_rank_before_anything_changes(tmp_path: Path) -> None:
    # I-16: with three ranks' states on two ranks, one rank gets two states, and the other could resume
    plain = torchmetrics.PearsonCorrCoef
    on_ranks(_run, 3, plain, tmp_path / "a", None, 2)
    for caught, _, unchanged in on_ranks(_run, 2, plain, tmp_path / "b", tmp_path / "a" / SAVED, -1):
        assert caught["type"] == "CheckpointError"
        assert "PearsonCorrCoef 'pearson'" in caught["text"]
        assert "merge_state" in caught["text"]
        assert unchanged
    # On the same number of ranks nothing needs to be merged.
    assert_resumed(on_ranks(_run, 3, plain, tmp_path / "c", tmp_path / "a" / SAVED, -1))
