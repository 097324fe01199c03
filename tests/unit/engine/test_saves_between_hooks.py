"""A checkpoint holds the state of a whole step, whatever asks for it and whenever, and counts each hook once (S-01)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Fit, TrainModule
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load
from drivetrain.errors import ConfigurationError

Act = Callable[[Any], None]


class Net(TrainModule):
    """Draws random numbers, counts validation steps in a buffer, and steps schedulers of both intervals.

    Args:
        moment: the moment at which to act.
        nth: how often the moment occurs until then.
        act: called with the run.
    """

    validated: torch.Tensor

    def __init__(self, moment: str = "", nth: int = 0, act: Act = lambda trainer: None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.register_buffer("validated", torch.zeros(()))
        self.moment, self.left, self.act = moment, nth, act

    def at(self, moment: str) -> None:
        if moment == self.moment:
            self.left -= 1
            if self.left == 0:
                self.act(self.trainer)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        if self.training:
            batch = [batch[0] + torch.rand(())]
            self.at("transfer")
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.at("training step")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1
        self.log("val_loss", self.net(batch[0]).square().mean())
        self.at("validation step")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.at("before the scheduler")
        scheduler.step()
        self.at("after the scheduler")

    def on_validation_end(self) -> None:
        self.at("validation end")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at("batch end")

    def on_train_epoch_end(self) -> None:
        self.at("epoch end")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, by_epoch]


HOOKS = ["on_train_batch_start", "on_before_zero_grad", "on_after_backward", "on_train_batch_end"]
HOOKS += ["on_validation_start", "on_validation_batch_end", "on_validation_epoch_end"]
HOOKS += ["on_validation_end", "on_train_epoch_end"]


class Counts(Callback):
    """Counts the calls of hooks, as `EarlyStopping` counts validations."""

    def __init__(self) -> None:
        self.calls = dict.fromkeys(HOOKS, 0)
        for hook in HOOKS:
            setattr(self, hook, lambda *_, hook=hook: self.calls.update({hook: self.calls[hook] + 1}))

    def state_dict(self) -> dict[str, Any]:
        return {"calls": dict(self.calls)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls.update(state["calls"])


def fail(trainer: Any) -> None:
    raise LookupError("as planned")


class SavesIn(Callback):
    """Saves at a call of a hook, before or after the other callbacks."""

    def __init__(self, hook: str, path: Path, nth: int = 2, priority: int = 0) -> None:
        self.priority = priority
        self.left = nth

        def save(trainer: Any, *_: Any) -> None:
            self.left -= 1
            if self.left == 0:
                trainer.save_checkpoint(path)

        setattr(self, hook, save)


def data(batch_size: int, shuffle: bool = False) -> DataLoader[Any]:
    samples = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(samples), batch_size, shuffle=shuffle)


def run(module: Net, *callbacks: Callback, path: Path | None = None, **settings: Any) -> dict[str, Any]:
    """Train, and return what a resumed run must arrive at too."""
    counts = Counts()
    options: dict[str, Any] = {"max_epochs": 3, "accelerator": "cpu", "num_sanity_val_steps": 0, **settings}
    trainer = Fit(**{**QUIET, "seed": 5, "callbacks": [counts, *callbacks], **options})
    trainer.fit(module, data(2, shuffle=True), data(4), ckpt_path=path)
    return {
        "state": {name: value.tolist() for name, value in module.state_dict().items()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "calls": counts.calls,
    }


@pytest.mark.parametrize(("priority", "interval"), [(50, 0.5), (-50, 1.0)])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_save_counts_every_hook_of_its_event_once(tmp_path: Path, hook: str, priority: int, interval: float) -> None:
    saved = tmp_path / "saved"
    expected = run(Net(), val_check_interval=interval)
    assert run(Net(), SavesIn(hook, saved, priority=priority), val_check_interval=interval) == expected
    assert run(Net(), path=saved, val_check_interval=interval) == expected


@pytest.mark.parametrize(
    ("moment", "nth", "window"),
    [
        ("transfer", 6, 2),
        ("validation step", 2, 1),
        ("validation step", 5, 2),
        ("before the scheduler", 3, 2),
        ("before the scheduler", 6, 1),
        ("after the scheduler", 6, 2),
        ("before the scheduler", 11, 1),
        ("after the scheduler", 11, 1),
    ],
)
def test_a_save_between_two_changes_of_the_state_resumes_exactly(
    tmp_path: Path, moment: str, nth: int, window: int
) -> None:
    """For example after the optimizer's step, and before that of the second scheduler."""
    saved = tmp_path / "saved"
    expected = run(Net(), accumulate_grad_batches=window)
    saving = Net(moment, nth, lambda trainer: trainer.save_checkpoint(saved))
    assert run(saving, accumulate_grad_batches=window) == expected
    assert run(Net(), path=saved, accumulate_grad_batches=window) == expected


@pytest.mark.parametrize(
    ("moment", "nth", "interval", "window"),
    [
        ("training step", 1, 1.0, 1),  # with the state before the step that failed
        ("training step", 15, 1.0, 2),
        ("batch end", 3, 1.0, 1),
        ("epoch end", 1, 1.0, 2),
        ("validation end", 1, 0.5, 1),
        ("validation end", 2, 1.0, 2),
    ],
)
def test_a_run_saved_after_a_failure_resumes_exactly(
    tmp_path: Path, moment: str, nth: int, interval: float, window: int
) -> None:
    settings: dict[str, Any] = {"val_check_interval": interval, "accumulate_grad_batches": window}
    expected = run(Net(), **settings)["state"]
    with pytest.raises(LookupError, match="as planned"):
        run(Net(moment, nth, fail), Checkpoint(tmp_path, save_on_exception=True, save_top_k=0), **settings)
    (saved,) = tmp_path.glob("exception*")
    assert run(Net(), path=saved, **settings)["state"] == expected


class StepsByHand(Net):
    """Fails after its optimizer's step."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch[0]).square().mean())
        optimizer.step()
        self.at("after the step")


@pytest.mark.parametrize(
    ("module", "warning"),
    [
        (Net("before the scheduler", 3, fail), "Nothing is saved after the failure"),
        (StepsByHand("after the step", 4, fail), "since weights had changed"),
    ],
)
def test_a_failure_after_the_optimizers_step_is_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, module: Net, warning: str
) -> None:
    with pytest.raises(LookupError, match="as planned"):
        run(module, Checkpoint(tmp_path, save_on_exception=True, save_top_k=0))
    assert warning in caplog.text
    assert not list(tmp_path.glob("exception*"))


@pytest.mark.parametrize("keeps", [False, True])
def test_a_save_in_on_exception_is_of_a_whole_step_or_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keeps: bool
) -> None:
    saving: Any = SavesIn("on_exception", tmp_path / "saved", nth=1)
    saving.save_on_exception = keeps
    with pytest.raises(LookupError, match="as planned"):
        run(Net("training step", 5, fail), saving)
    assert (tmp_path / "saved").exists() == keeps
    assert ("was not kept by Checkpoint(save_on_exception=True)" in caplog.text) != keeps
    if keeps:
        assert run(Net(), path=tmp_path / "saved")["state"] == run(Net())["state"]


def test_a_requested_save_whose_step_fails_is_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save_and_fail(trainer: Any) -> None:
        trainer.save_checkpoint(tmp_path / "saved")
        fail(trainer)

    with pytest.raises(LookupError, match="as planned"):
        run(Net("training step", 4, save_and_fail))
    assert f"{tmp_path / 'saved'}' is not written" in caplog.text
    assert not (tmp_path / "saved").exists()


def test_after_a_failed_fit_half_a_step_is_refused_and_a_whole_one_is_saved(tmp_path: Path) -> None:
    def failed(moment: str, nth: int) -> Fit:
        trainer = Fit(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, seed=5)
        with pytest.raises(LookupError, match="as planned"):
            trainer.fit(Net(moment, nth, fail), data(2), data(4))
        return trainer

    for weights_only in (False, True):
        with pytest.raises(ConfigurationError, match="save_on_exception=True"):
            failed("training step", 4).save_checkpoint(tmp_path / "half", weights_only)
        assert not (tmp_path / "half").exists()
        failed("epoch end", 1).save_checkpoint(tmp_path / f"whole-{weights_only}", weights_only)
        assert load(tmp_path / f"whole-{weights_only}").progress["global_step"] == 10
