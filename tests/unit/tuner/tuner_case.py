"""Modules and data for the tests of the tuner. Both use random generators, and the module has buffers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drivetrain import DataModule, Fit, TrainModule

FEATURES = 4


def quiet(**settings: Any) -> Fit:
    """Return a `Fit` on one CPU that prints and writes nothing."""
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "max_epochs": 1,
    }
    return Fit(**{**options, **settings})


class Net(TrainModule):
    """Regression with dropout, buffers and a schedule; records its losses."""

    def __init__(self, lr: float = 0.05, batch_size: int = 4) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
        self.lr = lr
        self.batch_size = batch_size
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class NoisyDataset(Dataset[Any]):
    """Adds noise to its samples, from the global random generators and from its own."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(samples, FEATURES, generator=generator)
        self.own = np.random.default_rng(5)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(FEATURES) + random.random() + float(np.random.rand()) + float(self.own.random())
        x = self.x[index]
        return x + 0.01 * noise, x.sum().reshape(1)


def data(samples: int) -> TensorDataset:
    x = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x.sum(1, keepdim=True))


def loader(samples: int = 40, batch_size: int = 4, **options: Any) -> Any:
    return DataLoader(data(samples), batch_size=batch_size, **options)


class Data(DataModule):
    """Builds its loaders with ``self.batch_size``."""

    def __init__(self, samples: int = 40, batch_size: int = 4) -> None:
        self.samples = samples
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.dataset = data(self.samples)

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_size=self.batch_size)
