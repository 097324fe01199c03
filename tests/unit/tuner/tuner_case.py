"""Modules and data for the tests of the tuner."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import DataModule, Fit, TrainModule

FEATURES = 4


def quiet(**settings: Any) -> Fit:
    """Return a `Fit` of one epoch on one CPU that prints and writes nothing."""
    options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    return Fit(**{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **options, **settings})


class Net(TrainModule):
    """Regression with dropout, buffers and a schedule; records its losses."""

    def __init__(self, lr: float = 0.05, batch_size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)  # how far a search comes before the loss rises depends on the weights
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


def loader(samples: int = 40, batch_size: int = 4, **options: Any) -> Any:
    x = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size, **options)


class Data(DataModule):
    def __init__(self, samples: int = 40, batch_size: int = 4) -> None:
        self.samples = samples
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.dataset = loader(self.samples).dataset

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_size=self.batch_size)
