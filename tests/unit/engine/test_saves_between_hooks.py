"""A checkpoint holds the state of a whole step, whatever asks for it and when, also of a preempted run: S-01, J-09."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from engine_case import QUIET
from small_modules import calling
from torch import nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import Callback, Fit, TrainModule
from drivetrain.callbacks import Checkpoint, EarlyStopping
from drivetrain.checkpoint import load
from drivetrain.errors import ConfigurationError

SAMPLES = 22  # 11 micro-batches of two per epoch
WITHIN_WINDOWS = {"accumulate_grad_batches": 4, "val_check_interval": 6, "check_val_every_n_epoch": None}


class Augmented(Dataset[Any]):
    """Draws random numbers when it is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([index / SAMPLES]), torch.rand(3) + random.random()])


def fail(trainer: Any) -> None:
    raise LookupError("as planned")


def preempt(trainer: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Changing(TrainModule):
    """Changes everything that a micro-batch can change: buffers, metric objects, logged values, generators, counters.

    Args:
        moment: the name of a moment, and its how many-th occurrence.
        act: called with the run at that moment.
    """

    batches: torch.Tensor
    validated: torch.Tensor

    def __init__(self, moment: tuple[str, int] = ("", 0), act: Callable[[Any], object] = fail) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("validated", torch.zeros((), dtype=torch.int64))
        self.train_mean = torchmetrics.MeanMetric()
        self.val_mean = torchmetrics.MeanMetric()
        self.moment, self.act = moment, act
        self.moments: list[str] = []
        self.after: list[str] = []  # the moments from ``moment`` on
        self.reached: list[Any] = []  # epochs begun, and validations that ended

    def at(self, name: str) -> None:
        self.moments.append(name)
        if self.after:
            self.after.append(name)
        if (name, self.moments.count(name)) == self.moment:
            self.after.append(name)
            self.act(self.trainer)

    def on_train_epoch_start(self) -> None:
        self.reached.append(("epoch", self.current_epoch))
        torch.rand(3)  # random numbers, which a second call would repeat

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        if self.training:
            batch = batch + 0.1 * torch.rand(())
            self.at("transfer")
        return batch

    def loss(self, batch: Any) -> torch.Tensor:
        return (self.net(batch) - batch[:, :1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches = self.batches + 1
        loss = self.loss(batch)
        self.train_mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("train_mean", self.train_mean, on_step=False, on_epoch=True)
        self.at("training step")
        return loss

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.at("before the scheduler")
        scheduler.step()
        self.at("after the scheduler")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at("batch end")

    def on_validation_start(self) -> None:
        self.at("validation start")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated += 1
        loss = self.loss(batch)
        self.val_mean.update(loss)
        self.log("val_loss", loss)
        self.at("validation step")

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", self.val_mean)

    def on_validation_end(self) -> None:
        self.reached.append(("validation", self.global_step, self.trainer.batch_idx))
        self.at("validation end")

    def on_train_epoch_end(self) -> None:
        self.at("epoch end")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
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


def saving_on_exception(folder: Path) -> Callback:
    return SavesIn("on_exception", folder / "saved", nth=1)


class Averaged(Callback):
    """Replaces the weights during a validation, from its start or from its first batch."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._swap)

    def _swap(self, trainer: Any, module: Any, batch: Any = None, batch_idx: int = 0, dataloader_idx: int = 0) -> None:
        if batch_idx or dataloader_idx:
            return
        self.trained = [one.detach().clone() for one in module.parameters()]
        for one in module.parameters():
            one.data.mul_(0.5)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        for one, trained in zip(module.parameters(), self.trained, strict=True):
            one.data.copy_(trained)


def keeping(folder: Path) -> Checkpoint:
    """Saves only what an interrupted or failed run keeps."""
    return Checkpoint(folder, every_n_train_steps=1000, save_top_k=0, save_on_exception=True)


def run(module: Changing, *callbacks: Callback, path: Any = None, counted: bool = False, **options: Any) -> Any:
    """Train, and return what a resumed run must arrive at too, with the calls of hooks if they are ``counted``."""
    counts, stopper = Counts(), EarlyStopping("val_loss/dataloader_idx_0", patience=50)
    settings = {**QUIET, "max_epochs": 2, "accelerator": "cpu", "num_sanity_val_steps": 0, **options}
    trainer = Fit(callbacks=[counts, stopper, *callbacks], **settings)
    validation = [DataLoader(Augmented(), batch_size=8) for _ in range(2)]
    trainer.fit(module, DataLoader(Augmented(), batch_size=2, shuffle=True), validation, ckpt_path=path)
    return {
        "state": {name: value.tolist() for name, value in module.state_dict().items()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "progress": (trainer.global_step, trainer.samples_seen, trainer.micro_batches, trainer.current_epoch),
        "stopping": stopper.state_dict(),
        "calls": counts.calls if counted else None,
    }


@cache
def undisturbed(averaged: str = "", **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the results of a run that nothing interrupts, its epochs and its validations."""
    module = Changing()
    return run(module, *[Averaged(averaged)] * bool(averaged), **options), module.reached


@pytest.mark.parametrize(("priority", "interval"), [(50, 0.5), (-50, 1.0)])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_save_counts_every_hook_of_its_event_once(tmp_path: Path, hook: str, priority: int, interval: float) -> None:
    options: dict[str, Any] = {"counted": True, "val_check_interval": interval, "max_epochs": 3}
    saved = tmp_path / "saved"
    expected, _ = undisturbed(**options)
    assert run(Changing(), SavesIn(hook, saved, priority=priority), **options) == expected
    assert run(Changing(), path=saved, **options) == expected


@pytest.mark.parametrize(
    ("moment", "window"),
    [
        (("transfer", 6), 2),
        (("validation step", 2), 1),
        (("validation step", 5), 2),
        (("before the scheduler", 3), 2),
        (("before the scheduler", 6), 1),
        (("after the scheduler", 7), 2),  # of the epoch's
        (("before the scheduler", 12), 1),
        (("after the scheduler", 12), 1),
    ],
)
def test_a_save_between_two_changes_of_the_state_resumes_exactly(tmp_path: Path, moment: Any, window: int) -> None:
    """For example after the optimizer's step, and before that of the second scheduler."""
    saved = tmp_path / "saved"
    options: dict[str, Any] = {"counted": True, "accumulate_grad_batches": window}
    expected, _ = undisturbed(**options)
    assert run(Changing(moment, lambda trainer: trainer.save_checkpoint(saved)), **options) == expected
    assert run(Changing(), path=saved, **options) == expected


@pytest.mark.parametrize(
    ("moment", "step", "options"),
    [
        (("training step", 2), 0, {"accumulate_grad_batches": 4}),  # within the very first window
        (("training step", 10), 2, {"accumulate_grad_batches": 4}),  # within the epoch's last window, a shorter one
        (("training step", 12), 3, {"accumulate_grad_batches": 4}),  # within an epoch's first window
        (("validation step", 5), 3, {"accumulate_grad_batches": 4}),  # of the second loader, after an epoch
        (("validation step", 12), 6, {"accumulate_grad_batches": 4}),  # after the last batch of the last validation
        (("validation step", 2), 1, WITHIN_WINDOWS),  # within a validation within a window
        (("training step", 7), 1, WITHIN_WINDOWS),  # within a window, after a finished validation
        (("validation step", 3), 4, {"val_check_interval": 4}),
        (("epoch end", 1), 3, {"accumulate_grad_batches": 4}),
        (("epoch end", 2), 6, {"accumulate_grad_batches": 4}),  # when the run ends
        # A validation after the last step still runs, within an epoch and at its end.
        (("validation step", 3), 6, {"max_steps": 6, "max_epochs": -1, "val_check_interval": 6}),
        (("validation step", 3), 11, {"max_steps": 11, "max_epochs": -1}),
    ],
)
def test_a_signal_in_a_window_stops_at_once_and_resumes(tmp_path: Path, moment: Any, step: int, options: Any) -> None:
    # J-09
    expected, reached = undisturbed(**options)
    leaving, resumed = Changing(moment, preempt), Changing()
    with pytest.raises(SystemExit) as left:
        run(leaving, keeping(tmp_path), **options)
    assert left.value.code == 143
    steps = [name for name in leaving.after if name in ("training step", "validation step")]
    assert len(steps) <= 2  # at most one more micro-batch
    (saved,) = tmp_path.glob("interrupted*")
    assert saved.name == f"interrupted-step={step}"
    assert load(saved).progress["global_step"] == step
    assert run(resumed, keeping(tmp_path), path="auto", **options) == expected
    assert leaving.reached + resumed.reached == reached


def test_a_run_that_is_preempted_twice_within_a_window_resumes_exactly(tmp_path: Path) -> None:  # J-09
    expected, _ = undisturbed(accumulate_grad_batches=8)
    for nth in (6, 3):
        with pytest.raises(SystemExit):
            run(Changing(("training step", nth), preempt), keeping(tmp_path), path="auto", accumulate_grad_batches=8)
        assert [saved.name for saved in tmp_path.glob("interrupted*")] == ["interrupted-step=0"]
    assert run(Changing(), keeping(tmp_path), path="auto", accumulate_grad_batches=8) == expected


def quantized(value: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(value, 0.1, 0, torch.quint8)


@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, quantized])
def test_a_module_with_a_sparse_or_quantized_parameter_trains_and_validates(convert: Any) -> None:  # J-09
    module = Changing()
    module.odd = nn.Parameter(convert(torch.eye(2)), requires_grad=False)
    trainer = Fit(**QUIET, max_epochs=1, accelerator="cpu", num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(Augmented(), batch_size=2), DataLoader(Augmented(), batch_size=8))
    assert (trainer.global_step, int(module.batches), int(module.validated)) == (11, 11, 3)


@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_batch_start"])
def test_temporary_weights_of_hooks_are_not_saved(tmp_path: Path, hook: str) -> None:  # J-09
    """The validation runs to its end, where the hooks put the trained weights back."""
    expected, _ = undisturbed(hook, accumulate_grad_batches=4)
    leaving = Changing(("validation step", 2), preempt)
    with pytest.raises(SystemExit):
        run(leaving, Averaged(hook), keeping(tmp_path), accumulate_grad_batches=4)
    assert leaving.after.count("validation step") == 5
    found = run(Changing(), Averaged(hook), keeping(tmp_path), path="auto", accumulate_grad_batches=4)
    assert found == expected


@pytest.mark.parametrize(
    ("moment", "interval", "window"),
    [
        (("training step", 1), 1.0, 1),  # with the state before the step that failed
        (("training step", 15), 1.0, 2),
        (("training step", 16), 1.0, 4),  # with the window's first micro-batch
        (("training step", 18), 1.0, 4),
        (("batch end", 3), 1.0, 1),
        (("batch end", 19), 1.0, 4),  # after its window's step
        (("epoch end", 1), 1.0, 2),
        (("validation start", 1), 1.0, 4),
        (("validation end", 1), 0.5, 1),
        (("validation end", 2), 1.0, 2),
    ],
)
def test_a_failed_run_is_saved_as_of_its_last_step(tmp_path: Path, moment: Any, interval: float, window: int) -> None:
    # S-01, J-09
    options: dict[str, Any] = {"val_check_interval": interval, "accumulate_grad_batches": window}
    expected, _ = undisturbed(**options)
    with pytest.raises(LookupError, match="as planned"):
        run(Changing(moment, fail), keeping(tmp_path), **options)
    (saved,) = tmp_path.glob("exception*")
    assert run(Changing(), path=saved, **options) == expected


def test_a_requested_stop_is_kept(tmp_path: Path) -> None:  # J-09
    """The stop is due at the end of the window, which a preempted run does not wait for."""

    def stop(trainer: Any) -> None:
        if trainer.micro_batches == 6:
            trainer.should_stop = True

    options: dict[str, Any] = {"accumulate_grad_batches": 4}
    stopping = calling("on_train_batch_end", stop)
    expected = run(Changing(), stopping, **options)
    with pytest.raises(SystemExit):
        run(Changing(("training step", 7), preempt), stopping, keeping(tmp_path), **options)
    assert run(Changing(), keeping(tmp_path), path="auto", **options) == expected
    assert expected["progress"][0] == 2


def test_requests_of_a_restarted_validation_take_effect_at_once(tmp_path: Path) -> None:  # J-09
    """A checkpoint holds the weights that were scored, and a stop takes effect before the next window."""

    def run_monitored(folder: Path, module: Changing) -> Any:
        saver = Checkpoint(folder, monitor="val_loss/dataloader_idx_0", save_top_k=-1)
        stopper = EarlyStopping("val_loss/dataloader_idx_0", patience=1, min_delta=10.0)
        result = run(module, saver, stopper, path="auto", max_epochs=1, val_check_interval=5)
        kept = [(Path(path).name, score) for path, score in saver.best_k_models.items()]
        return result, kept, [load(folder / name).progress["batch_idx"] for name, _ in kept]

    expected = run_monitored(tmp_path / "undisturbed", Changing())
    assert (expected[0]["progress"][0], expected[2]) == (10, [5, 10])
    with pytest.raises(SystemExit):
        run_monitored(tmp_path / "left", Changing(("validation step", 9), preempt))
    assert run_monitored(tmp_path / "left", Changing()) == expected


class StepsByHand(Changing):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.at("after the step")


def save_and_fail(trainer: Any) -> None:
    trainer.save_checkpoint(trainer.default_root_dir + "/saved")
    fail(trainer)


@pytest.mark.parametrize(
    ("module", "callback", "warning"),
    [
        (Changing(("before the scheduler", 3), fail), keeping, "Nothing is saved after the failure"),
        (StepsByHand(("after the step", 4), fail), keeping, "since weights had changed"),
        (Changing(("training step", 5), fail), saving_on_exception, "not kept by Checkpoint(save_on_exception=True)"),
        (Changing(("training step", 4), save_and_fail), lambda folder: Callback(), "/saved' is not written"),
    ],
)
def test_half_a_step_is_not_saved(tmp_path: Path, caplog: Any, module: Changing, callback: Any, warning: str) -> None:
    with pytest.raises(LookupError, match="as planned"):
        run(module, callback(tmp_path), default_root_dir=tmp_path)
    assert warning in caplog.text
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_save_in_on_exception_is_of_the_last_whole_step_if_that_is_kept(tmp_path: Path) -> None:
    saving: Any = saving_on_exception(tmp_path)
    saving.save_on_exception = True
    with pytest.raises(LookupError, match="as planned"):
        run(Changing(("training step", 5), fail), saving)
    assert run(Changing(), path=tmp_path / "saved") == undisturbed()[0]


def test_after_a_failed_fit_half_a_step_is_refused_and_a_whole_one_is_saved(tmp_path: Path) -> None:
    def failed(*moment: Any) -> Fit:
        trainer = Fit(**QUIET, max_epochs=1, accelerator="cpu")
        with pytest.raises(LookupError, match="as planned"):
            trainer.fit(Changing(moment, fail), DataLoader(Augmented(), batch_size=2))
        return trainer

    for weights_only in (False, True):
        with pytest.raises(ConfigurationError, match="save_on_exception=True"):
            failed("training step", 4).save_checkpoint(tmp_path / "half", weights_only)
        assert not (tmp_path / "half").exists()
        failed("epoch end", 1).save_checkpoint(tmp_path / f"whole-{weights_only}", weights_only)
        assert load(tmp_path / f"whole-{weights_only}").progress["global_step"] == 11
