"""Two runs that save into one folder at the same time: F-05, F-07."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from drawing_run import KEPT, Augmented, Drawing
from torch.utils.data import DataLoader

from drivetrain import Fit
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load, verify
from drivetrain.testing import run_distributed


class InStep(Drawing):
    """Begins each step, and therefore each save, together with the other run."""

    def __init__(self, store: Any) -> None:
        super().__init__(lambda *words: None)
        self.store = store

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        here = f"step {self.global_step}"
        self.store.add(here, 1)
        while self.store.add(here, 0) < 2:
            time.sleep(0.0001)


def _run(folder: Path) -> Any:
    seed = dist.get_rank() + 1
    dist.destroy_process_group()  # the runs differ from here on
    module = InStep(dist.FileStore(f"{folder}.store", 2))  # type: ignore[attr-defined]
    saver = Checkpoint(folder, every_n_train_steps=1, save_async=seed == 2, keep_last=KEPT)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    fit = Fit(accelerator="cpu", callbacks=saver, default_root_dir=folder, max_epochs=2, seed=seed, **quiet)
    fit.fit(module, DataLoader(Augmented(), batch_size=3, shuffle=True))
    return seed, sorted(saver.best_k_models), [parameter.detach() for parameter in module.parameters()]


def test_neither_run_changes_the_files_of_the_other(tmp_path: Path) -> None:
    for seed, kept, trained in run_distributed(_run, 2, tmp_path):
        assert len(kept) == KEPT
        for path in kept:
            assert verify(path) == []
            assert load(path).state()["data"]["seed"] == seed, f"{path} is the other's"
        newest = load(max(kept, key=lambda path: load(path).progress["global_step"])).weights()
        assert all(torch.equal(one, other) for one, other in zip(newest.values(), trained, strict=True))
    assert len(os.listdir(tmp_path)) == 2 * KEPT + 2  # "latest", and the folder of runs
    assert len(os.listdir(tmp_path / "drivetrain_logs")) == 2
