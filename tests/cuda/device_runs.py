"""What the tests on a device train: small modules that use the specific features of devices."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule

BATCH = 8
REHEARSED = "REHEARSED_DEVICES" in os.environ
"""On emulated devices."""


class Net(TrainModule):
    def __init__(self, dropout: float = 0.0, width: int = 16, fused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle = nn.Sequential(nn.ReLU(), nn.Dropout(dropout)) if dropout else nn.ReLU()
        self.net = nn.Sequential(nn.Linear(8, width), middle, nn.Linear(width, 1))
        self.fused = fused

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]).float(), batch[1].float())
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", nn.functional.mse_loss(self.net(batch[0]).float(), batch[1].float()), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2, eps=1e-5, fused=self.fused)


def rows(batches: int = 8, **settings: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(BATCH * batches, width, generator=generator) for width in (8, 1))
    return DataLoader(TensorDataset(x, y), **{"batch_size": BATCH, **settings})


def trained(module: Net, loader: DataLoader[Any] | None = None, **settings: Any) -> Fit:
    """Train on a device without output, and validate; returns the `Fit`."""
    ckpt_path = settings.pop("ckpt_path", None)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    fit = Fit(**{"accelerator": "cuda", "devices": 1, "enable_checkpointing": False, **quiet, **settings})
    fit.fit(module, loader or rows(), rows(2), ckpt_path=ckpt_path)
    return fit


def weights(module: Net) -> Tensor:
    return torch.cat([value.detach().flatten().cpu().float() for value in module.net.state_dict().values()])
