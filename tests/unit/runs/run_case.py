"""Small runs with folders, and functions that read or edit their records."""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule
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


def data(samples: int = 4 * STEPS) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(samples, 3, generator=generator)), batch_size=4)


def fit(root: Path | str, **options: Any) -> Fit:
    """Return a quiet Fit with a CSVLogger and a Checkpoint."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "seed": 0, "log_every_n_steps": 1}
    settings = {"max_epochs": 1, "logger": CSVLogger(root), "callbacks": Checkpoint(), **quiet, **options}
    return Fit(default_root_dir=root, accelerator="cpu", **settings)


def trained(root: Path | str, ckpt_path: Any = None, module: Net | None = None, **options: Any) -> Fit:
    """Run a Fit, and return it."""
    trainer = fit(root, **options)
    trainer.fit(Net() if module is None else module, data(), ckpt_path=ckpt_path)
    return trainer


def folders(root: Path, name: str = NAME) -> list[str]:
    place = root / name
    return sorted(one.name for one in place.iterdir()) if place.exists() else []


def version(trainer: Fit) -> str:
    """Return the name of a run's folder."""
    return Path(str(trainer.log_dir)).name


def rows(folder: Any) -> list[dict[str, str]]:
    """Return the table of a run's CSVLogger."""
    with (Path(folder) / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def every(step: int, dirpath: Any = None) -> Checkpoint:
    """Return a callback that saves every few steps, and keeps all."""
    return Checkpoint(dirpath, every_n_train_steps=step, save_top_k=-1)


def newest_of(trainer: Fit) -> str:
    """Return the path of a run's newest checkpoint."""
    assert trainer.checkpoint_callback is not None
    return trainer.checkpoint_callback.best_model_path


def record(folder: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((Path(folder) / "run.json").read_text())
    return document


def edit(folder: Any, **values: Any) -> dict[str, Any]:
    """Edit a record."""
    document = {**record(folder), **values}
    (Path(folder) / "run.json").write_text(json.dumps(document))
    return document


def stopped(root: Path, step: int, **options: Any) -> Fit:
    """Return a Fit that failed at a step, with its folder as a killed run leaves it."""

    def fail(at: int) -> None:
        if at == step:
            raise RuntimeError("killed")

    trainer = fit(root, **options)
    try:
        trainer.fit(Net(at_step=fail), data())
    except RuntimeError:
        pass
    else:
        raise AssertionError("it was to fail")
    return trainer


def left_running(folder: Any, **process: Any) -> None:
    """Edit a record so that its run is running, in a process with some changed fields."""
    document = record(folder)
    edit(folder, status="running", ended=None, why=None, process={**document["process"], **process})


def process_of(pid: int) -> dict[str, Any]:
    """Return the record's entry for a process of this machine."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return {"pid": pid, "began": fields[19]}


def of_an_earlier_version(checkpoint: Path) -> None:
    """Remove the run from a manifest, as in checkpoints written before runs had folders."""
    manifest = checkpoint / "manifest.json"
    document = json.loads(manifest.read_text())
    del document["run"], document["crc32"]
    body = json.dumps(document, indent=1).encode().removesuffix(b"\n}")
    manifest.write_bytes(body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode())
