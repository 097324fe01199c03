"""GarbageCollection: when Python's collector runs, and that it is restored."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule
from drivetrain.callbacks import GarbageCollection
from drivetrain.errors import ConfigurationError


class Littering(TrainModule):
    """Creates enough reference cycles to trigger automatic collections."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.fails = fails
        self.ran: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fails and batch_idx == 1:
            raise RuntimeError("as asked")
        for _ in range(2000):
            ring: list[Any] = []
            ring.append(ring)
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _collections(path: Path, module: Littering, callbacks: list[Any]) -> list[tuple[int, int]]:
    """Return (step, generation) of each collection during training."""
    trainer = Fit(
        max_epochs=1, accelerator="cpu", default_root_dir=path, callbacks=callbacks, accumulate_grad_batches=2,
        enable_progress_bar=False, enable_model_summary=False, logger=False, enable_checkpointing=False,
    )  # fmt: skip
    ran: list[tuple[int, int]] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and trainer.state == "fitting" and trainer.progress.micro_batches:
            ran.append((trainer.global_step, info["generation"]))

    gc.callbacks.append(note)
    try:
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(20, 2))))
    finally:
        gc.callbacks.remove(note)
    return ran


def test_it_collects_at_its_steps_and_at_no_other(tmp_path: Path) -> None:
    by_itself = _collections(tmp_path, Littering(), [])
    assert len(by_itself) > 20  # automatic collection every 700 objects
    held = _collections(tmp_path, Littering(), [GarbageCollection(every_n_steps=4)])
    assert held[:3] == [(4, 1), (8, 1), (10, 2)]  # by steps, whatever the window; all objects at the end of the epoch
    assert gc.isenabled()


def test_the_collector_is_left_as_it_was(tmp_path: Path) -> None:
    #
    with pytest.raises(RuntimeError, match="as asked"):
        _collections(tmp_path, Littering(fails=True), [GarbageCollection()])
    assert gc.isenabled()
    gc.disable()
    try:
        _collections(tmp_path, Littering(), [GarbageCollection()])
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_number_that_counts_no_steps_is_refused() -> None:
    # G-06
    with pytest.raises(ConfigurationError, match="every_n_steps=0"):
        GarbageCollection(every_n_steps=0)
