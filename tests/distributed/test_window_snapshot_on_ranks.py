"""One rank is signalled within a long window or a validation: all ranks leave together, and lose nothing. J-09."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import Fit, TrainModule
from drivetrain.callbacks import Checkpoint
from drivetrain.testing import run_distributed
from drivetrain_strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

SAMPLES = 61  # not divisible by two ranks, batches of two or windows of eight
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "zero 3": lambda: DeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=0),
}


class Augmented(Dataset[Any]):
    """Draws random numbers when it is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([index / SAMPLES]), torch.rand(3) + random.random()])


class Uneven(IterableDataset[Any]):
    """Rank 1 has twice as much data as rank 0."""

    more = 1

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank = int(os.environ["RANK"])
        return (torch.full((4,), index + 0.5 * rank) for index in range(20 * (1 + self.more * rank)))


class Even(Uneven):
    """Both ranks have equally much data, but cannot know before, and evaluation steps use a collective."""

    more = 0


class Changing(TrainModule):
    batches: torch.Tensor

    def __init__(self, moment: tuple[Any, ...] | None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("batches", torch.zeros(()))
        self.mean = torchmetrics.MeanMetric()
        self.moment = moment
        self.meets = False
        self.told: list[Any] = []

    def at(self, *moment: Any) -> None:
        if moment == self.moment and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches += 1 + self.global_rank  # differs between ranks
        loss = (self.net(batch) - batch[:, :1]).square().mean()
        self.mean.update(loss.detach())
        self.log("loss", loss, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.at("train", self.current_epoch, batch_idx)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = (self.net(batch) - batch[:, :1]).square().mean()
        if self.meets:
            torch.distributed.all_reduce(loss.clone())  # a collective
        self.log("val_loss", loss)
        self.at("validate", self.current_epoch, batch_idx)

    def on_validation_end(self) -> None:
        self.told.append((self.global_step, self.trainer.batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def _train(folder: Path, name: str, validation: Dataset[Any], module: Changing, **options: Any) -> Any:
    fit = Fit(
        strategy=STRATEGIES[name](),
        accelerator="cpu",
        callbacks=Checkpoint(folder, every_n_train_steps=1000),
        default_root_dir=folder,
        max_epochs=2,
        seed=3,
        logger=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"accumulate_grad_batches": 8, **options},
    )
    training = DataLoader(Augmented(), batch_size=2, shuffle=True)
    fit.fit(module, training, DataLoader(validation, batch_size=2), ckpt_path="auto")
    return {
        "state": {name: value.tolist() for name, value in module.state_dict().items()},
        "metrics": {name: float(value) for name, value in fit.callback_metrics.items()},
        "counts": (fit.global_step, fit.samples_seen, fit.micro_batches),
    }


def _leave_and_go_on(folder: Path, name: str, cases: list[Any]) -> list[Any]:
    came, undisturbed = [], {}
    for number, (moment, validation, options) in enumerate(cases):
        place, kind = folder / str(number), f"{type(validation).__name__} {options}"
        leaving, resumed = Changing(moment), Changing(None)
        leaving.meets = resumed.meets = isinstance(validation, Even)
        if kind not in undisturbed:
            module = Changing(None)
            module.meets = isinstance(validation, Even)
            undisturbed[kind] = _train(place / "undisturbed", name, validation, module, **options), module.told
        wanted, told = undisturbed[kind]
        code: Any = None
        try:
            _train(place / "left", name, validation, leaving, **options)
        except SystemExit as error:
            code = error.code
        saved = sorted(one.name for one in (place / "left").iterdir() if "step=" in one.name)
        found = _train(place / "left", name, validation, resumed, **options)
        came.append((code, saved, found == wanted, leaving.told + resumed.told == told))
    return came


WITHIN_WINDOWS = {"val_check_interval": 5, "check_val_every_n_epoch": None}
CASES: list[Any] = [
    (("train", 0, 3), Augmented(), {}),
    (("train", 0, 12), Augmented(), WITHIN_WINDOWS),
    (("train", 1, 1), Augmented(), {}),
    (("validate", 0, 2), Augmented(), {}),
    (("validate", 0, 3), Augmented(), WITHIN_WINDOWS),
    (("validate", 0, 1), Uneven(), {}),
    (("validate", 0, 15), Uneven(), {}),  # after rank 0 has finished
    (("validate", 0, 4), Even(), {}),
]
# Rank 0 may have reached the end of the window: without a preceding collective it need not wait for rank 1.
STEPS = [{0, 1}, {1, 2}, {2, 3}, {2}, {0, 1}, {2}, {2}, {2}]


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_all_ranks_leave_at_once_and_lose_nothing(tmp_path: Path, name: str) -> None:  # J-09
    env = {"DRIVETRAIN_PREEMPTION_SIGNALS": "SIGUSR1"}
    for came in run_distributed(_leave_and_go_on, 2, tmp_path, name, CASES, process_group=None, env=env, timeout=120):
        for (moment, validation, _), steps, (code, found, alike, told_alike) in zip(CASES, STEPS, came, strict=True):
            case = name, moment, type(validation).__name__
            assert code == 128 + signal.SIGUSR1, case
            assert found in [[f"interrupted-step={step}"] for step in steps], (case, found)
            assert alike, case
            assert told_alike, case


class Stopping(Changing):
    """Rank 1 requests a stop within the first window, and may be preempted before the window ends.

    Args:
        moment: when it is preempted.
        folder: the folder of files with which the ranks wait for each other, for reproducible agreements.
    """

    asks = True

    def __init__(self, moment: tuple[Any, ...] | None, folder: Path) -> None:
        super().__init__(moment)
        self.folder = folder

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:  # before DDP's own collectives in a forward
        now = self.global_rank, self.current_epoch, batch_idx
        (self.folder / f"{now}").touch()
        if self.moment is not None and now == (1, 0, 2):
            self.wait_for(0, 0, 4)
        if self.moment is not None and now == (0, 0, 4):
            self.wait_for(1, 0, 3)  # which then has requested to leave at the end of this batch

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = self.global_rank, self.current_epoch, batch_idx
        if self.asks and now == (1, 0, 1):
            self.trainer.should_stop = True

    def wait_for(self, *moment: int) -> None:
        deadline = time.monotonic() + 30
        while not (self.folder / f"{moment}").exists():
            assert time.monotonic() < deadline, moment
            time.sleep(0.001)


def _stop_and_leave(folder: Path) -> tuple[Any, ...]:
    meetings = [folder / "meetings" / name for name in ("undisturbed", "left")]
    for one in meetings:
        one.mkdir(parents=True, exist_ok=True)
    wanted = _train(folder / "undisturbed", "ddp", Augmented(), Stopping(None, meetings[0]))["counts"]
    code: Any = None
    try:
        _train(folder / "left", "ddp", Augmented(), Stopping(("train", 0, 2), meetings[1]))
    except SystemExit as error:
        code = error.code
    resumed = Stopping(None, meetings[1])
    resumed.asks = False
    return code, wanted, _train(folder / "left", "ddp", Augmented(), resumed)["counts"]


def test_a_stop_requested_by_one_rank_is_kept(tmp_path: Path) -> None:  # J-09
    env = {"DRIVETRAIN_PREEMPTION_SIGNALS": "SIGUSR1"}
    for code, wanted, found in run_distributed(_stop_and_leave, 2, tmp_path, process_group=None, env=env):
        assert code == 128 + signal.SIGUSR1
        # One rank requests it when the other has started the second window; the resumed run knows it from the start.
        assert (wanted[0], found[0]) == (2, 1)
