"""Small modules, loaders and runs of the tests of callbacks."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule
from drivetrain.callbacks import LambdaCallback
from drivetrain.loggers import CSVLogger

CHECKPOINTS = "drivetrain_logs/version_0/checkpoints"  # of the first run, below the root


class Regression(TrainModule):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.lr = lr

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Scored(Regression):
    """Logs one of ``scores`` as ``score`` at the end of each epoch, and records the epochs that it starts."""

    def __init__(self, scores: list[float] | None = None) -> None:
        super().__init__()
        self.scores = scores or [0.0] * 9
        self.started: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.started.append(self.current_epoch)

    def on_train_epoch_end(self) -> None:
        self.log("score", self.scores[self.current_epoch])


class Validated(Regression):
    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = scores

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.scores[self.current_epoch])


class Clock:
    """A clock that tests advance, in place of a module's ``time`` or of a function."""

    def __init__(self, monkeypatch: Any = None, replaced: str = "") -> None:
        self.now = 1000.0
        if monkeypatch is not None:
            monkeypatch.setattr(replaced, self)

    def __call__(self) -> float:
        return self.now

    monotonic = time = __call__


class Timed(Regression):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.clock.now += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 2
        self.log("val_loss", float(batch_idx), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.clock.now += 2

    predict_step = test_step


def loader(samples: int = 40, batch_size: int = 4) -> DataLoader[Any]:
    """Return an unshuffled loader of pairs of shapes (4,) and (1,)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)


def quiet_fit(**options: Any) -> Fit:
    """Return a `Fit` on the CPU that prints and writes nothing, unless ``options`` say otherwise."""
    run: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "num_sanity_val_steps": 0, "seed": 1}
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    return Fit(**(run | off | options))


def train(root: Path, callbacks: Any, module: Any = None, *loaders: Any, ckpt_path: Any = None, **options: Any) -> Fit:
    """Train a module with checkpoints in ``root``: by default a `Scored`, for six steps an epoch."""
    fit = quiet_fit(default_root_dir=root, callbacks=callbacks, enable_checkpointing=True, **options)
    data, *validation = loaders or (loader(6, 1),)
    fit.fit(Scored() if module is None else module, data, validation or None, ckpt_path=ckpt_path)
    return fit


def failing(micro_batches: int) -> LambdaCallback:
    """Raise a RuntimeError after this many micro-batches."""

    def fail(trainer: Any, *arguments: Any) -> None:
        if trainer.micro_batches == micro_batches:
            raise RuntimeError("out of luck")

    return LambdaCallback(on_train_batch_start=fail)


def saving(step: int, path: Path) -> LambdaCallback:
    """Return a callback that saves a checkpoint to ``path`` after an optimizer step."""

    def save(trainer: Any, *arguments: Any) -> None:
        if trainer.global_step == step:
            trainer.save_checkpoint(path)

    return LambdaCallback(on_train_batch_end=save)


def folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir())


def checkpoint_names(root: Path) -> list[str]:
    return folders(root / CHECKPOINTS)


def logged_rows(logger: CSVLogger) -> list[dict[str, str]]:
    with open(f"{logger.log_dir}/metrics.csv", newline="") as stream:
        return list(csv.DictReader(stream))
