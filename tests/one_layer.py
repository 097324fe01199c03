"""A module of one layer, for runs of which it does not matter what they train."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain import TrainModule


class OneLayer(TrainModule):
    def __init__(self, inputs: int = 2) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(inputs, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
