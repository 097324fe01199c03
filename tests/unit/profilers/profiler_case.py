"""A small module, its data and a quiet Fit, for tests of profilers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from drivetrain import Fit, TrainModule

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
    "max_epochs": 1,
    "seed": 0,
}


def fit(path: Path, **options: Any) -> Fit:
    """A Fit whose files go to ``path``."""
    return Fit(**{"default_root_dir": path, **QUIET, **options})


class Rows(Dataset[torch.Tensor]):
    """Vectors of two numbers."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 1.0])


def loader(samples: int = 8, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(Rows(samples), batch_size=batch_size)


class Net(TrainModule):
    """One layer, which all stages run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch).square().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)
