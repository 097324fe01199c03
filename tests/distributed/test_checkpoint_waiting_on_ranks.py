"""Checkpoint(monitor=...) before the first validation, on several ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import verify
from worlds import on_ranks


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())
        if self.trainer.global_rank == 0:
            self.log("of_rank_0", 1.0, sync_dist=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _saved(folder: str, strategy: str, save_async: bool) -> dict[str, float | None]:
    data = DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=2)
    checkpoint = Checkpoint(
        folder, "{step}-{of_rank_0:.0f}", "val_loss", every_n_train_steps=3, save_top_k=-1, save_async=save_async
    )
    quiet: dict[str, Any] = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "num_sanity_val_steps": 0,
    }
    trainer = Fit(
        accelerator="cpu", strategy=strategy, callbacks=checkpoint, max_epochs=2, default_root_dir=folder, **quiet
    )
    trainer.fit(Net(), data, data)
    return {os.path.basename(path): score for path, score in checkpoint.best_k_models.items()}


@pytest.mark.parametrize("save_async", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_due_save_waits_on_all_ranks(strategy: str, save_async: bool, tmp_path: Path) -> None:
    #
    first, second = on_ranks(_saved, 2, str(tmp_path), strategy, save_async)
    assert first == second
    assert list(first) == ["step=4-of_rank_0=1", "step=8-of_rank_0=1"]  # S-04: after validations
    assert all(score is not None for score in first.values())
    assert [verify(tmp_path / name) for name in first] == [[]] * len(first)
