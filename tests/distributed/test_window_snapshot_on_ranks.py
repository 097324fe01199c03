"""One rank is signalled within a long window or a validation: all ranks leave together, and lose nothing. J-09."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from small_runs import FEATURES, STRATEGIES, Regression, quiet, seeded
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain.callbacks import Checkpoint
from drivetrain.testing import run_distributed

SAMPLES = 61  # not divisible by two ranks, batches of two or windows of eight
ENV = {"DRIVETRAIN_PREEMPTION_SIGNALS": "SIGUSR1"}


class Augmented(Dataset[Any]):
    """Draws random numbers when it is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([index / SAMPLES]), torch.rand(3) + random.random()])


class Stream(IterableDataset[Any]):
    """Rank 1 has ``more`` times as much data on top of that of rank 0."""

    def __init__(self, more: int) -> None:
        self.more = more

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank = int(os.environ["RANK"])
        return (torch.full((FEATURES,), index + 0.5 * rank) for index in range(20 * (1 + self.more * rank)))


UNEVEN, EVEN = Stream(1), Stream(0)


class Changing(Regression):
    """Has state that differs between ranks; rank 1 is signalled at a moment.

    Args:
        moment: when.
        meets: validation steps use a collective.
    """

    batches: torch.Tensor

    def __init__(self, moment: tuple[Any, ...] | None = None, meets: bool = False) -> None:
        super().__init__()
        self.net = seeded(lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)))
        self.register_buffer("batches", torch.zeros(()))
        self.mean = torchmetrics.MeanMetric()
        self.moment, self.meets = moment, meets
        self.validated: list[Any] = []

    def loss(self, batch: Any) -> torch.Tensor:
        return (self.net(batch) - batch[:, :1]).square().mean()

    def signal_at(self, *moment: Any) -> None:
        if moment == self.moment and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches += 1 + self.global_rank  # differs between ranks
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        self.log("loss", loss, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.signal_at("train", self.current_epoch, batch_idx)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        if self.meets:
            torch.distributed.all_reduce(loss.clone())
        self.log("val_loss", loss)
        self.signal_at("validate", self.current_epoch, batch_idx)

    def on_validation_end(self) -> None:
        self.validated.append((self.global_step, self.trainer.batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def train(folder: Path, name: str, validation: Dataset[Any], module: Changing, **options: Any) -> Any:
    """Return the exit code of a run that is signalled, or everything that a finished run arrives at."""
    settings = {"enable_checkpointing": True, "max_epochs": 2, "seed": 3, "accumulate_grad_batches": 8, **options}
    saver = Checkpoint(folder, every_n_train_steps=1000)
    fit = quiet(strategy=STRATEGIES[name](), callbacks=saver, default_root_dir=folder, **settings)
    training = DataLoader(Augmented(), batch_size=2, shuffle=True)
    try:
        fit.fit(module, training, DataLoader(validation, batch_size=2), ckpt_path="auto")
    except SystemExit as error:
        return error.code
    return {
        "state": {name: value.tolist() for name, value in module.state_dict().items()},
        "metrics": {name: float(value) for name, value in fit.callback_metrics.items()},
        "counts": (fit.global_step, fit.samples_seen, fit.micro_batches),
    }


WITHIN_WINDOWS = {"val_check_interval": 5, "check_val_every_n_epoch": None}
CASES: list[Any] = [
    (("train", 0, 12), Augmented(), WITHIN_WINDOWS),
    (("validate", 0, 3), Augmented(), WITHIN_WINDOWS),
    (("validate", 0, 15), UNEVEN, {}),  # after rank 0 has finished
    (("validate", 0, 4), EVEN, {}),
    (("train", 0, 3), Augmented(), {}),
    (("train", 1, 1), Augmented(), {}),
    (("validate", 0, 1), UNEVEN, {}),
]
# Rank 0 may have reached the end of the window: without a preceding collective it need not wait for rank 1.
STEPS = [{1, 2}, {0, 1}, {2}, {2}, {0, 1}, {2, 3}, {2}]


def _leave_and_resume(folder: Path, name: str, cases: list[Any]) -> list[Any]:
    found: list[Any] = []
    undisturbed: dict[str, Any] = {}
    for number, (moment, validation, options) in enumerate(cases):
        left, meets = folder / str(number), getattr(validation, "more", 1) == 0
        kind = f"{type(validation)} {getattr(validation, 'more', '')} {options}"
        if kind not in undisturbed:
            module = Changing(meets=meets)
            undisturbed[kind] = train(folder / f"whole {number}", name, validation, module, **options), module.validated
        leaving, resumed = Changing(moment, meets), Changing(meets=meets)
        code = train(left, name, validation, leaving, **options)
        saved = [one.name for one in left.iterdir() if "step=" in one.name]
        result = train(left, name, validation, resumed, **options)
        found.append((code, saved, (result, leaving.validated + resumed.validated) == undisturbed[kind]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero 3"])
def test_all_ranks_leave_at_once_and_lose_nothing(tmp_path: Path, name: str) -> None:  # J-09
    cases = CASES if name == "ddp" else CASES[:4]
    for found in run_distributed(_leave_and_resume, 2, tmp_path, name, cases, process_group=None, env=ENV, timeout=120):
        for (moment, *_), steps, (code, saved, alike) in zip(cases, STEPS, found, strict=False):
            assert code == 128 + signal.SIGUSR1, moment
            assert saved in [[f"interrupted-step={step}"] for step in steps], (moment, saved)
            assert alike, moment


class Stopping(Changing):
    """Rank 1 requests a stop within the first window, and may be preempted before the window ends.

    Args:
        moment: when it is preempted.
        folder: the folder of files with which the ranks wait for each other, for reproducible agreements.
        asks: it requests the stop.
    """

    def __init__(self, moment: tuple[Any, ...] | None, folder: Path, asks: bool = True) -> None:
        super().__init__(moment)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.asks = folder, asks

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:  # before DDP's own collectives in a forward
        now = self.global_rank, self.current_epoch, batch_idx
        (self.folder / f"{now}").touch()
        if self.moment is not None and now == (1, 0, 2):
            self.wait_for(0, 0, 4)
        if self.moment is not None and now == (0, 0, 4):
            self.wait_for(1, 0, 3)  # which then has requested to leave at the end of this batch

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.asks and (self.global_rank, self.current_epoch, batch_idx) == (1, 0, 1):
            self.trainer.should_stop = True

    def wait_for(self, *moment: int) -> None:
        deadline = time.monotonic() + 30
        while not (self.folder / f"{moment}").exists():
            assert time.monotonic() < deadline, moment
            time.sleep(0.001)


def _stop_and_leave(folder: Path) -> tuple[Any, ...]:
    whole = train(folder / "whole", "ddp", Augmented(), Stopping(None, folder / "meetings of the whole"))
    moment, meetings = ("train", 0, 2), folder / "meetings"
    code = train(folder / "left", "ddp", Augmented(), Stopping(moment, meetings))
    resumed = train(folder / "left", "ddp", Augmented(), Stopping(None, meetings, asks=False))
    return code, whole["counts"][0], resumed["counts"][0]


def test_a_stop_requested_by_one_rank_is_kept(tmp_path: Path) -> None:  # J-09
    for found in run_distributed(_stop_and_leave, 2, tmp_path, process_group=None, env=ENV):
        # Rank 1 requests it when rank 0 has started the second window; the resumed run knows it from the start.
        assert found == (128 + signal.SIGUSR1, 2, 1)
