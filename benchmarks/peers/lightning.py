"""Lightning: a `LightningModule` and a `Trainer`.

Bare is ``barebones=True``. That disables ``self.log``, so the loop that logs disables everything else by name. Typical
is the defaults with a CSV logger, the tqdm bar (the default without rich), and a checkpoint callback that is never due.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from benchmarks.nets import checksum
from benchmarks.peers import on_a_terminal
from benchmarks.peers.trained_module import Trained
from benchmarks.work import NEVER, Way, Work

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


class Module(Trained, pl.LightningModule):
    """`Trained` as a Lightning module."""


def train(work: Work, way: Way, steps: int) -> float:
    module = Module(work, way)
    if not way.values:
        return _fit(module, work, steps, barebones=True)
    if not way.typical:
        return _fit(module, work, steps, enable_model_summary=False, **QUIET)
    with on_a_terminal() as folder:
        idle = ModelCheckpoint(folder, every_n_train_steps=NEVER)
        callbacks = [idle, TQDMProgressBar()]
        return _fit(module, work, steps, logger=CSVLogger(folder), callbacks=callbacks, enable_model_summary=False)


def _fit(module: Module, work: Work, steps: int, **options: Any) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, **options).fit(module, work.loader(steps))
    return checksum(module.net)
