"""torchtnt: a `TrainUnit`, whose step is the user's own, and an `AutoUnit`, whose step is torchtnt's.

Values go to one of its loggers at the interval that other frameworks have by default: to one that keeps them in memory,
or in the typical run to the CSV logger. Typical adds its tqdm bar and its checkpoint callback, which is never due.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.nets import checksum
from benchmarks.peers import on_a_terminal
from benchmarks.work import EVERY, NEVER, Way, Work

# torchtnt imports this module, which current setuptools lacks, for a torch without a version, and never uses it.
sys.modules.setdefault("pkg_resources", ModuleType("pkg_resources"))

from torchtnt.framework.auto_unit import AutoUnit  # noqa: E402
from torchtnt.framework.callbacks.dcp_saver import DistributedCheckpointSaver  # noqa: E402
from torchtnt.framework.callbacks.tqdm_progress_bar import TQDMProgressBar  # noqa: E402
from torchtnt.framework.state import State  # noqa: E402
from torchtnt.framework.train import train as run  # noqa: E402
from torchtnt.framework.unit import TrainUnit  # noqa: E402
from torchtnt.utils.loggers import CSVLogger, InMemoryLogger  # noqa: E402

Batch = list[Tensor]


class Unit(TrainUnit[Batch]):
    def __init__(self, work: Work, way: Way, logger: Any) -> None:
        super().__init__()
        self.net = work.net()
        self.optimizer = work.optimizer(self.net)
        self.loss_of = work.loss
        self.names = way.names
        self.values = logger

    def train_step(self, state: State, data: Batch) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss_of(self.net, data)
        loss.backward()
        self.optimizer.step()
        if self.names:
            step = self.train_progress.num_steps_completed + 1
            if step % EVERY == 0:
                self.values.log_dict({name: loss.item() for name in self.names}, step)
        return loss


class Automatic(AutoUnit[Batch]):
    def __init__(self, work: Work, way: Way, logger: Any) -> None:
        self.make_optimizer = work.optimizer
        self.loss_of = work.loss
        self.names = way.names
        super().__init__(module=work.net(), device=torch.device("cpu"))
        self.values = logger

    def compute_loss(self, state: State, data: Batch) -> tuple[Tensor, Any]:
        return self.loss_of(self.module, data), None

    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return self.make_optimizer(module), None

    def on_train_step_end(self, state: State, data: Batch, step: int, results: Any) -> None:
        if self.names and step % EVERY == 0:
            self.values.log_dict({name: results.loss.item() for name in self.names}, step)


def train(work: Work, way: Way, steps: int) -> float:
    unit = _run(Unit, work, way, steps)
    return checksum(unit.net)


def train_automatically(work: Work, way: Way, steps: int) -> float:
    unit = _run(Automatic, work, way, steps)
    return checksum(unit.module)


def _run(kind: Any, work: Work, way: Way, steps: int) -> Any:
    with on_a_terminal() if way.typical else nullcontext("") as folder:
        callbacks: list[Any] = []
        logger: Any = None
        if way.typical:
            logger = CSVLogger(f"{folder}/metrics.csv", steps_before_flushing=100)
            callbacks = [TQDMProgressBar(), DistributedCheckpointSaver(folder, save_every_n_train_steps=NEVER)]
        elif way.names:
            logger = InMemoryLogger()
        unit = kind(work, way, logger)
        run(unit, work.loader(steps), max_epochs=1, callbacks=callbacks)
        if logger is not None:
            logger.close()
        return unit
