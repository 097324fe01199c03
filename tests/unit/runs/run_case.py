"""Small runs with folders, and functions that read or edit their records."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule
from drivetrain._runs import liveness
from drivetrain._runs.process import _start_time
from drivetrain._runs.record import now
from drivetrain.callbacks import Checkpoint
from drivetrain.loggers import CSVLogger

STEPS = 6  # in an epoch
NAME = "drivetrain_logs"


class Net(TrainModule):
    """A linear module with a hyper-parameter; it calls ``at_step`` in each training step."""

    def __init__(self, lr: float = 0.1, at_step: Callable[[int], None] = lambda step: None) -> None:
        super().__init__()
        self.save_hyperparameters("lr")
        self.at_step = at_step
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.at_step(self.global_step)
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).mean())

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test", self.net(batch[0]).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Another(Net):
    """The same module under another class."""


def data(**options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(4 * STEPS, 3, generator=generator)), batch_size=4, **options)


def fit(root: Path | str, **options: Any) -> Fit:
    """Return a quiet Fit with a CSVLogger and a Checkpoint."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "seed": 0, "log_every_n_steps": 1}
    settings = {"max_epochs": 1, "logger": CSVLogger(root), "callbacks": Checkpoint(), **quiet, **options}
    return Fit(default_root_dir=root, accelerator="cpu", **settings)


def trained(root: Path | str, ckpt_path: Any = None, module: Net | None = None, **options: Any) -> Fit:
    trainer = fit(root, **options)
    trainer.fit(Net() if module is None else module, data(), ckpt_path=ckpt_path)
    return trainer


def folders(root: Path, name: str = NAME) -> list[str]:
    place = root / name
    return sorted(one.name for one in place.iterdir()) if place.exists() else []


def version(trainer: Fit) -> str:
    return Path(str(trainer.log_dir)).name


def rows(folder: Any) -> list[dict[str, str]]:
    """Return the table of a run's CSVLogger."""
    with (Path(folder) / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def every(step: int) -> Checkpoint:
    """Return a callback that saves every few steps, and keeps all."""
    return Checkpoint(every_n_train_steps=step, save_top_k=-1)


def record(folder: Any) -> Any:
    return json.loads((Path(folder) / "run.json").read_text())


def edit(folder: Any, **values: Any) -> None:
    (Path(folder) / "run.json").write_text(json.dumps({**record(folder), **values}))


def stopped(root: Path, step: int, **options: Any) -> Fit:
    """Return a Fit that failed at a step, with its folder as a killed run leaves it."""

    def fail(at: int) -> None:
        if at == step:
            raise RuntimeError("killed")

    trainer = fit(root, **options)
    with pytest.raises(RuntimeError, match="killed"):
        trainer.fit(Net(at_step=fail), data())
    return trainer


def left_running(folder: Any, **process: Any) -> None:
    """Edit a record so that its run is running, in a process with some changed fields: by default in process 1."""
    process = process or {"pid": 1, "began": _start_time(1)}
    edit(folder, status="running", ended=None, why=None, process={**record(folder)["process"], **process})


def watched(monkeypatch: pytest.MonkeyPatch, folder: Any, alive: bool, **values: Any) -> None:
    """Let runs watch others briefly; a run that is ``alive`` changes its heartbeat and values in its record."""
    monkeypatch.setattr(liveness, "WATCH_SECONDS", 0.4)
    original = liveness.watch

    def watch(run: Any, read: Callable[[str], Any], after_look: Callable[[], object]) -> bool:
        def changed(path: str) -> Any:
            if alive:
                edit(folder, heartbeat=now(), **values)
            return read(path)

        return original(run, changed, after_look)

    monkeypatch.setattr(liveness, "watch", watch)
