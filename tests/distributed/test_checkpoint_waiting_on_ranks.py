"""Checkpoint(monitor=...) before the first validation, on several ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from small_runs import Regression, loader, quiet

from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import verify
from worlds import on_ranks


class Logs(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        if self.global_rank == 0:
            self.log("of_rank_0", 1.0, sync_dist=False)


def _saved(folder: str, strategy: str, save_async: bool) -> dict[str, float | None]:
    options: dict[str, Any] = {"every_n_train_steps": 3, "save_top_k": -1, "save_async": save_async}
    checkpoint = Checkpoint(folder, "{step}-{of_rank_0:.0f}", "val_loss", **options)
    settings: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": folder, "max_epochs": 2}
    batches = loader(16, 2)
    quiet(strategy=strategy, callbacks=checkpoint, **settings).fit(Logs(), batches, batches)
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
