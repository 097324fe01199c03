"""Trains the benchmark network with the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.nets import BATCH, GPT, Data, checksum, texts
from drivetrain import Fit, Strategy, TrainModule


class Trained(TrainModule):
    """The benchmark GPT, or another network, trained with AdamW."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = GPT() if net is None else net

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return self.optimizer


def train_by_engine(
    strategy: str | Strategy,
    steps: int,
    module: Trained | None = None,
    net: Callable[[], GPT] = GPT,
    data: Data = TensorDataset,
    accelerator: str = "cpu",
    **settings: Any,
) -> float:
    """Train on this rank's part of the data, with further arguments of `Fit`; return a checksum of the weights."""
    torch.manual_seed(0)
    module = module or Trained(net())
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    loader = DataLoader(data(texts(steps * BATCH * ranks)), batch_size=BATCH)
    options = {"max_epochs": 1, "barebones": True, **settings}
    Fit(strategy=strategy, accelerator=accelerator, devices=ranks, **options).fit(module, loader)
    return checksum(module.net)
