"""A save from any hook of an epoch counts every hook of its event once, and none twice (S-01)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
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

    def on_train_epoch_end(self) -> None:
        self.at("epoch end")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, by_epoch]


HOOKS = ["on_train_batch_end", "on_validation_start", "on_validation_batch_end", "on_validation_epoch_end"]
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


class SavesIn(Callback):
    """Saves at the second call of a hook, before or after the other callbacks."""

    def __init__(self, hook: str, priority: int, path: Path) -> None:
        self.priority = priority
        self.left = 2

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
    trainer = Fit(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        seed=5,
        callbacks=[counts, *callbacks],
        **settings,
    )
    trainer.fit(module, data(2, shuffle=True), data(4), ckpt_path=path)
    return {
        "state": {name: value.tolist() for name, value in module.state_dict().items()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "calls": counts.calls,
    }


@pytest.mark.parametrize("interval", [0.5, 1.0])
@pytest.mark.parametrize("priority", [50, -50])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_save_counts_every_hook_of_its_event_once(tmp_path: Path, hook: str, priority: int, interval: float) -> None:
    saved = tmp_path / "saved"
    expected = run(Net(), val_check_interval=interval)
    assert run(Net(), SavesIn(hook, priority, saved), val_check_interval=interval) == expected
    assert run(Net(), path=saved, val_check_interval=interval) == expected


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(
    ("moment", "nth"),
    [
        ("transfer", 6),
        ("validation step", 2),
        ("validation step", 5),
        ("before the scheduler", 3),
        ("before the scheduler", 6),
        ("after the scheduler", 6),
        ("before the scheduler", 11),
        ("after the scheduler", 11),
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


def test_a_save_of_a_run_whose_batches_are_none_resumes_exactly(tmp_path: Path) -> None:
    class Drawing(Net):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
            return None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step([torch.rand(4, 3)], batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            """Validate nothing, since there is no batch."""

    expected = run(Drawing())
    assert run(Drawing("training step", 3, lambda trainer: trainer.save_checkpoint(tmp_path / "saved"))) == expected
    assert run(Drawing(), path=tmp_path / "saved") == expected


def fail(trainer: Any) -> None:
    raise LookupError("as planned")


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(
    ("moment", "nth", "interval"), [("epoch end", 1, 1.0), ("validation end", 1, 0.5), ("validation end", 2, 1.0)]
)
def test_a_failure_after_a_validation_is_saved_with_what_the_validation_changed_or_before_it(
    tmp_path: Path, moment: str, nth: int, interval: float, window: int
) -> None:
    settings: dict[str, Any] = {"val_check_interval": interval, "accumulate_grad_batches": window}
    expected = run(Net(), **settings)["state"]
    with pytest.raises(LookupError, match="as planned"):
        run(Net(moment, nth, fail), Checkpoint(tmp_path, save_on_exception=True, save_top_k=0), **settings)
    (saved,) = tmp_path.glob("exception*")
    assert run(Net(), path=saved, **settings)["state"] == expected


def test_a_failure_within_the_step_of_a_scheduler_is_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(LookupError, match="as planned"):
        run(Net("before the scheduler", 3, fail), Checkpoint(tmp_path, save_on_exception=True, save_top_k=0))
    assert "Nothing is saved after the failure" in caplog.text
    assert not list(tmp_path.glob("exception*"))


def test_a_requested_save_whose_step_fails_is_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save_and_fail(trainer: Any) -> None:
        trainer.save_checkpoint(tmp_path / "saved")
        fail(trainer)

    with caplog.at_level(logging.WARNING), pytest.raises(LookupError, match="as planned"):
        run(Net("training step", 4, save_and_fail))
    assert f"{tmp_path / 'saved'}' is not written" in caplog.text
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("weights_only", [False, True])
def test_after_a_failed_fit_half_a_step_is_refused_and_a_whole_one_is_saved(tmp_path: Path, weights_only: bool) -> None:
    def failed(moment: str, nth: int) -> Fit:
        trainer = Fit(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, seed=5)
        with pytest.raises(LookupError, match="as planned"):
            trainer.fit(Net(moment, nth, fail), data(2), data(4))
        return trainer

    with pytest.raises(ConfigurationError, match="save_on_exception=True"):
        failed("training step", 4).save_checkpoint(tmp_path / "half", weights_only)
    assert not (tmp_path / "half").exists()
    failed("epoch end", 1).save_checkpoint(tmp_path / "whole", weights_only)
    assert load(tmp_path / "whole").progress["global_step"] == 10
