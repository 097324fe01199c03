"""drivetrain: a `TrainModule` and a `Fit`.

Bare is ``barebones=True``. Typical is the defaults with a CSV logger, and a checkpoint callback that is never due.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.nets import checksum
from benchmarks.peers import on_a_terminal
from benchmarks.peers.trained_module import Trained
from benchmarks.work import NEVER, Way, Work
from drivetrain import Fit, TrainModule
from drivetrain.callbacks import Checkpoint
from drivetrain.loggers import CSVLogger


class Module(Trained, TrainModule):
    """`Trained` as a drivetrain module."""


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
