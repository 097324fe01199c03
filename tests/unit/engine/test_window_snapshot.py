"""A preemption signal within a long window or a validation: the run exits at once and resumes exactly. J-09."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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
from drivetrain.testing import requires_linux

SAMPLES, BATCH = 46, 2  # 23 micro-batches per epoch
Moment = tuple[Any, ...]


class Augmented(Dataset[Any]):
    """Draws random numbers when it is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([index / SAMPLES]), torch.rand(3) + random.random()])


class Changing(TrainModule):
    """Changes everything that a micro-batch can change: buffers, metric objects, logged values, generators,
    counters.
    """

    batches: torch.Tensor
    validated: torch.Tensor

    def __init__(self, *at: Callable[[Moment], None]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("validated", torch.zeros((), dtype=torch.int64))
        self.train_mean = torchmetrics.MeanMetric()
        self.val_mean = torchmetrics.MeanMetric()
        self.watching = at
        self.told: list[Any] = []

    def at(self, *moment: Any) -> None:
        for watch in self.watching:
            watch(moment)

    def on_train_epoch_start(self) -> None:
        self.told.append(("epoch starts", self.current_epoch))
        torch.rand(3)  # random numbers, which a second call would repeat

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches = self.batches + 1
        loss = (self.net(batch) - batch[:, :1]).square().mean()
        self.train_mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("train_mean", self.train_mean, on_step=False, on_epoch=True)
        self.at("train", self.current_epoch, batch_idx)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at("batch ends", self.current_epoch, batch_idx)

    def on_validation_start(self) -> None:
        self.at("validation starts", self.current_epoch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated += 1
        loss = (self.net(batch) - batch[:, :1]).square().mean()
        self.val_mean.update(loss)
        self.log("val_loss", loss)
        self.at("validate", self.current_epoch, self.trainer.batch_idx, batch_idx, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", self.val_mean)

    def on_validation_end(self) -> None:
        self.told.append(("validated", self.global_step, self.trainer.batch_idx))

    def on_train_epoch_end(self) -> None:
        self.at("epoch ends", self.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


class Leave:
    """Sends this process SIGTERM once, at a given moment."""

    def __init__(self, *moment: Any) -> None:
        self.moment = moment
        self.sent = False

    def __call__(self, now: Moment) -> None:
        if now == self.moment and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)


def train(folder: Path, module: Changing, *callbacks: Callback, validates: bool = True, **options: Any) -> Fit:
    settings = {**QUIET, "max_epochs": 2, "accumulate_grad_batches": 8, "num_sanity_val_steps": 0, **options}
    saver = Checkpoint(folder, every_n_train_steps=1000, save_on_exception=True)
    stopper = [EarlyStopping("val_loss/dataloader_idx_0", patience=50)] if validates else []
    fit = Fit(default_root_dir=folder, callbacks=[saver, *stopper, *callbacks], **settings)
    training = DataLoader(Augmented(), batch_size=BATCH, shuffle=True)
    fit.fit(module, training, two_loaders() if validates else None, ckpt_path="auto")
    return fit


def two_loaders() -> list[DataLoader[Any]]:
    return [DataLoader(Augmented(), batch_size=8) for _ in range(2)]


def end(fit: Fit, module: Changing) -> dict[str, Any]:
    """Return everything that must be equal after a resume."""
    stopper = next(one for one in fit.callbacks if isinstance(one, EarlyStopping))
    return {
        "state": {name: value.tolist() for name, value in module.state_dict().items()},
        "metrics": {name: float(value) for name, value in fit.callback_metrics.items()},
        "counts": (fit.global_step, fit.samples_seen, fit.micro_batches, fit.current_epoch),
        "stopping": stopper.state_dict(),
    }


WITHIN_WINDOWS = {"val_check_interval": 12, "check_val_every_n_epoch": None}


@pytest.mark.parametrize(
    ("moment", "step", "options"),
    [
        (("train", 0, 3), 0, {}),  # within the very first window
        (("train", 0, 20), 2, {}),  # within the epoch's last window, which is shorter
        (("train", 1, 0), 3, {}),  # within an epoch's first window
        (("validate", 0, 23, 3, 1), 3, {}),  # within the second loader, after the last batch of the last validation
        (("validate", 1, 23, 5, 1), 6, {}),  # after the last batch of the last validation
        (("validate", 0, 12, 2, 0), 1, WITHIN_WINDOWS),  # within a validation within a window
        (("train", 0, 14), 1, WITHIN_WINDOWS),  # within a window, after a finished validation
        (("validate", 0, 6, 2, 0), 6, {"accumulate_grad_batches": 1, "val_check_interval": 6}),
        (("epoch ends", 0), 3, {}),
        (("epoch ends", 1), 6, {}),  # when the run ends
    ],
)
def test_a_signal_within_a_window_stops_at_once_and_resumes_exactly(
    tmp_path: Path, moment: Moment, step: int, options: dict[str, Any]
) -> None:  # J-09
    undisturbed = Changing()
    wanted = end(train(tmp_path / "undisturbed", undisturbed, **options), undisturbed)
    seen: list[Moment] = []
    leaving = Changing(Leave(*moment), seen.append)
    with pytest.raises(SystemExit) as left:
        train(tmp_path / "left", leaving, **options)
    assert left.value.code == 143
    steps = [now for now in seen[seen.index(moment) :] if now[0] in ("train", "validate")]
    assert len(steps) <= 2  # at most one more micro-batch
    (saved,) = [one for one in (tmp_path / "left").iterdir() if one.name.startswith("interrupted")]
    assert saved.name == f"interrupted-step={step}"
    assert load(saved).progress["global_step"] == step
    resumed = Changing()
    assert end(train(tmp_path / "left", resumed, **options), resumed) == wanted
    assert leaving.told + resumed.told == undisturbed.told


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


@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_batch_start"])
def test_temporary_weights_of_hooks_are_not_saved(tmp_path: Path, hook: str) -> None:  # J-09
    """The validation runs to its end, where the hooks put the trained weights back."""
    undisturbed, resumed = Changing(), Changing()
    wanted = end(train(tmp_path / "undisturbed", undisturbed, Averaged(hook)), undisturbed)
    seen: list[Moment] = []
    with pytest.raises(SystemExit):
        train(tmp_path / "left", Changing(Leave("validate", 0, 23, 1, 0), seen.append), Averaged(hook))
    assert ("validate", 0, 23, 5, 1) in seen
    assert end(train(tmp_path / "left", resumed, Averaged(hook)), resumed) == wanted


@pytest.mark.parametrize(
    "moment",
    [
        ("train", 1, 8),  # with the window's first micro-batch
        ("train", 1, 11),
        ("batch ends", 1, 15),  # after its step
        ("validation starts", 0),
    ],
)
def test_a_failed_run_is_saved_with_the_state_of_its_last_step(tmp_path: Path, moment: Moment) -> None:  # J-09
    undisturbed, resumed = Changing(), Changing()
    wanted = end(train(tmp_path / "undisturbed", undisturbed), undisturbed)

    def fail(now: Moment) -> None:
        if now == moment:
            raise RuntimeError("once")

    with pytest.raises(RuntimeError, match="once"):
        train(tmp_path / "c", Changing(fail))
    assert end(train(tmp_path / "c", resumed), resumed) == wanted


def test_a_requested_stop_is_kept(tmp_path: Path) -> None:  # J-09
    """The checkpoint is due at the end of the window, which a preempted run does not wait for."""

    def stop(trainer: Any) -> None:
        if trainer.micro_batches == 11:
            trainer.should_stop = True

    undisturbed, resumed = Changing(), Changing()
    stopping = calling("on_train_batch_end", stop)
    wanted = train(tmp_path / "undisturbed", undisturbed, stopping, validates=False)
    with pytest.raises(SystemExit):
        train(tmp_path / "left", Changing(Leave("train", 0, 11)), stopping, validates=False)
    fit = train(tmp_path / "left", resumed, validates=False)
    assert (fit.global_step, fit.micro_batches) == (wanted.global_step, wanted.micro_batches) == (2, 16)
    assert torch.equal(resumed.net[0].weight, undisturbed.net[0].weight)


_SCRIPT = """
import sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Fit, TrainModule
from drivetrain._engine import signals

where = sys.argv[1]
signals._FIRST_SIGNAL_GRACE = 1.0  # not to wait for it in a test

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def wait(self, here):
        if here == where:
            print("there", flush=True)
            if here == "blocked":
                torch.distributed.TCPStore("127.0.0.1", 0, 2, True)
            time.sleep(0.5 if here == "end" else 30)
    def setup(self, stage):
        self.wait("blocked")
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean()
    def validation_step(self, batch, batch_idx):
        self.wait("sanity check")
    def on_train_end(self):
        self.wait("end")
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = DataLoader(TensorDataset(torch.ones(4, 1)))
Fit(accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False,
    enable_model_summary=False).fit(Net(), data, data)
"""


@requires_linux()
@pytest.mark.parametrize("where", ["sanity check", "end", "blocked"])
def test_a_run_with_nothing_left_to_save_also_exits_with_143(tmp_path: Path, where: str) -> None:  # J-09
    (tmp_path / "script.py").write_text(_SCRIPT)
    command = [sys.executable, "script.py", where]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, cwd=tmp_path, env=variables, **pipes)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n", process.communicate()[1]
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=40)
        assert time.monotonic() - began < 20
    finally:
        process.kill()
    assert process.returncode == 143, errors


@pytest.mark.parametrize(
    ("moment", "options"),
    [
        (("validate", 0, 12, 2, 0), {"max_steps": 12, "val_check_interval": 12}),  # within an epoch
        (("validate", 0, 23, 2, 0), {"max_steps": 23}),  # at an epoch's end
    ],
)
def test_a_validation_after_the_last_step_still_runs(
    tmp_path: Path, moment: Moment, options: dict[str, Any]
) -> None:  # J-09
    options |= {"accumulate_grad_batches": 1, "max_epochs": -1}
    undisturbed = Changing()
    wanted = end(train(tmp_path / "undisturbed", undisturbed, **options), undisturbed)
    leaving, resumed = Changing(Leave(*moment)), Changing()
    with pytest.raises(SystemExit):
        train(tmp_path / "left", leaving, **options)
    assert end(train(tmp_path / "left", resumed, **options), resumed) == wanted
    assert leaving.told + resumed.told == undisturbed.told


def test_requests_of_a_restarted_validation_take_effect_at_once(tmp_path: Path) -> None:  # J-09
    """A checkpoint holds the weights that were scored, and a stop takes effect before the next window."""

    def run(folder: Path, module: Changing) -> Any:
        saver = Checkpoint(folder, monitor="val_loss/dataloader_idx_0", save_top_k=-1)
        stopper = EarlyStopping("val_loss/dataloader_idx_0", patience=1, min_delta=10.0)
        settings = {**QUIET, "max_epochs": 1, "num_sanity_val_steps": 0, "val_check_interval": 5}
        fit = Fit(default_root_dir=folder, callbacks=[saver, stopper], **settings)
        fit.fit(module, DataLoader(Augmented(), batch_size=BATCH, shuffle=True), two_loaders(), ckpt_path="auto")
        kept = [(Path(path).name, score) for path, score in saver.best_k_models.items()]
        return kept, [load(folder / name).progress["batch_idx"] for name, _ in kept], fit.global_step, fit.state

    wanted = run(tmp_path / "undisturbed", Changing())
    assert wanted[1:3] == ([5, 10], 10)
    with pytest.raises(SystemExit):
        run(tmp_path / "left", Changing(Leave("validate", 0, 10, 2, 0)))
    assert run(tmp_path / "left", Changing()) == wanted
