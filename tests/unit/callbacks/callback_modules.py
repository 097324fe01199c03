"""Small modules and loaders that the tests train for real."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule


class Regression(TrainModule):
    """Linear regression that logs its losses."""

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


def loader(samples: int = 40, batch_size: int = 4) -> DataLoader[Any]:
    """Return a loader of ``samples`` pairs of shapes (4,) and (1,), unshuffled."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)


def quiet_fit(**options: Any) -> Fit:
    """Return a `Fit` on the CPU that prints and writes nothing, unless ``options`` say otherwise."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "seed": 1,
    }
    return Fit(**(defaults | options))
