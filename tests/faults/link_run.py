"""A run over two nodes that records its progress, and resumes from its last checkpoint when restarted."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Fit, RunContext, TrainModule
from drivetrain.callbacks import Checkpoint
from drivetrain_strategies import DDPStrategy

STEPS = 40
TIMEOUT = 4.0  # seconds


class Line(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(STEPS * 4, 4, generator=generator), torch.randn(STEPS * 4, 1, generator=generator))


class RecordsSteps(Callback):
    """Writes every step, and the first step of each start, into the folder; slows the run down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        with (self.folder / f"starts-{trainer.global_rank}").open("a") as file:
            file.write(f"{trainer.global_step}\n")

    def on_train_batch_end(
        self, trainer: RunContext, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        (self.folder / f"step-{trainer.global_rank}").write_text(str(trainer.global_step))
        time.sleep(0.05)


def run(folder: Path, batch_size: int = 2, **options: Any) -> Line:
    module = Line()
    Fit(
        accelerator="cpu",
        max_epochs=1,
        seed=3,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    ).fit(module, DataLoader(data(), batch_size=batch_size, shuffle=True), ckpt_path="auto")
    return module


def main() -> None:
    folder = Path(sys.argv[1])
    module = run(
        folder,
        strategy=DDPStrategy(timeout=timedelta(seconds=TIMEOUT)),
        callbacks=[RecordsSteps(folder), Checkpoint(every_n_train_steps=5)],
    )
    torch.save(module.layer.weight.detach(), folder / f"weight-{sys.argv[2]}.pt")


if __name__ == "__main__":
    main()
