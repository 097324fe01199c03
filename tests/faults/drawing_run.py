"""A small run that draws random numbers wherever a run can, and reports its progress, for tests that interrupt it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from striking import Fault, Striker
from torch import nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import Fit, TrainModule
from drivetrain.callbacks import Checkpoint
from drivetrain_strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy

FEATURES = 4
SAMPLES = 41  # not divisible by two ranks, batches of three or windows of two
KEPT = 2
QUIET: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
QUIET["accelerator"] = "cpu"

STRATEGIES: dict[str, Any] = {
    "single": lambda step_timeout=None: SingleDeviceStrategy(),
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "zero 3": lambda **more: DeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=0, **more),
}


class Augmented(Dataset[Any]):
    """Draws random numbers when it is read; the first number of a sample is its index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.rand(FEATURES) + random.random()])


class Drawing(TrainModule):
    """Uses dropout, epoch averages and metrics, and a learning rate that changes with every step."""

    def __init__(self, tell: Callable[..., None]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
        self.mean = torchmetrics.MeanMetric()
        self.tell = tell

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.net(batch[:, 1:]) - 0.01 * batch[:, :1]).square().mean()
        if not self.trainer.joining:
            self.tell("loss", (self.current_epoch, batch_idx), loss.item())
        self.mean.update(loss.detach())
        self.log("loss", loss, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        self.tell("from", self.global_step)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tell("step", self.global_step)


def train(folder: Path, strategy: str, every: int, in_background: bool, tell: Any, fault: Fault | None = None) -> Any:
    """Start or resume, and return everything that must be equal however often the run was interrupted.

    ``tell`` receives events as they happen. A fault of kind "none" only counts calls.
    """
    saver = Checkpoint(every_n_train_steps=every, save_async=in_background, keep_last=KEPT)
    module: Any = Drawing(tell)
    data: Any = Augmented()
    more: dict[str, Any] = {}
    if fault is not None:
        striker = Striker(fault, tell, folder)
        module, data, more = striker.module(module), striker.data(data), striker.settings()
    callbacks: list[Any] = [saver] if fault is None else [saver, striker.callback()]
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, "seed": 3}
    plan = STRATEGIES[strategy](**more)
    trainer = Fit(strategy=plan, callbacks=callbacks, default_root_dir=folder, **settings, **QUIET)
    validation: Any = None if fault is None else DataLoader(torch.zeros(4, 1), batch_size=2)  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(data, batch_size=3, shuffle=True), validation, ckpt_path="auto")
    if fault is not None:
        tell("calls", dict(striker.calls))
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"weights": weights, "metrics": metrics, "steps": trainer.global_step, "samples": trainer.samples_seen}
