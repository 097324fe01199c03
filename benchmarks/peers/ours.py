"""drivetrain: a `TrainModule` and a `Fit`.

Bare is ``barebones=True``. Typical is the defaults with a CSV logger, and a checkpoint callback whose turn never comes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.nets import checksum
from benchmarks.peers import on_a_terminal
from benchmarks.work import NEVER, Way, Work
from drivetrain import Fit, TrainModule
from drivetrain.callbacks import Checkpoint
from drivetrain.loggers import CSVLogger


class Module(TrainModule):
    def __init__(self, work: Work, way: Way) -> None:
        super().__init__()
        self.net = work.net()
        self.loss_of = work.loss
        self.make_optimizer = work.optimizer
        self.names = way.names
        self.shown = way.typical

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss_of(self.net, batch)
        for name in self.names:
            self.log(name, loss, prog_bar=self.shown)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.net)


def train(work: Work, way: Way, steps: int) -> float:
    module = Module(work, way)
    if not way.typical:
        return _fit(module, work, steps, barebones=True)
    with on_a_terminal() as folder:
        idle = Checkpoint(folder, every_n_train_steps=NEVER)
        return _fit(module, work, steps, logger=CSVLogger(folder), callbacks=[idle], enable_model_summary=False)


def _fit(module: Module, work: Work, steps: int, **options: Any) -> float:
    Fit(max_epochs=1, accelerator="cpu", **options).fit(module, work.loader(steps))
    net: nn.Module = module.net
    return checksum(net)
