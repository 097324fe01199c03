"""The module code that drivetrain and Lightning share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.work import Way, Work


class Trained:
    """A step that logs as many values as configured; a mixin placed before the framework's module class."""

    def __init__(self, work: Work, way: Way) -> None:
        super().__init__()
        self.net = work.net()
        self.loss_of = work.loss
        self.make_optimizer = work.optimizer
        self.names = way.names
        self.shown = way.typical

    def training_step(self: Any, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.loss_of(self.net, batch)
        for name in self.names:
            self.log(name, loss, prog_bar=self.shown)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.net)
