"""A small module, its data and a quiet Fit, for tests of profilers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain import Fit, TrainModule
from drivetrain.profilers import SimpleProfiler


def fit(path: Path, **options: Any) -> Fit:
    """Return a `Fit` of one epoch on the CPU whose files go to ``path``."""
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    settings: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 1, "num_sanity_val_steps": 0, "seed": 0, **off}
    return Fit(**{"default_root_dir": path, **settings, **options})


def loader(samples: int = 8) -> DataLoader[Any]:
    """Return batches of two vectors of two numbers."""
    return DataLoader(torch.ones(samples, 2), batch_size=2)  # type: ignore[arg-type]


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch).square().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class FailingNet(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise ValueError("no more")
        return super().training_step(batch, batch_idx)


class SpanningNet(Net):
    spans = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.trainer.profiler.profile("augmentation"):
            self.spans += 1
        return super().training_step(batch, batch_idx)


def rows_by_path(profiler: SimpleProfiler) -> dict[str, Any]:
    """Return the rows of a run's profile, and check that they add up to the run's time, to the nanosecond."""
    assert 0 < profiler.total_ns == sum(row.self_ns for row in profiler.rows())
    return {" > ".join(row.path): row for row in profiler.rows()}
