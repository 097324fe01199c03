"""A combination with a loader that saves its own position resumes each loader where it was, exactly once: S-02."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Tiny, fit, loader, stream
from torch.utils.data import DataLoader, IterableDataset

from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load
from drivetrain.data import CombinedLoader


class Stateful(IterableDataset[Any]):
    """Batches 100, 101, ... that go on from the position that is loaded."""

    def __init__(self, batches: int) -> None:
        self.batches, self.start, self.done = batches, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.done, self.start = self.start, 0
        while self.done < self.batches:
            self.done += 1
            yield torch.tensor([[99.0 + self.done, 1.0]])

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["done"]


class Sized(Stateful):
    def __len__(self) -> int:
        return self.batches


def stateful() -> DataLoader[Any]:
    return DataLoader(Stateful(3), batch_size=None)


class Reads(Tiny):
    """Records the first samples of each loader's batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list) else [batch]
        self.rows.append([None if part is None else int(part[0, 0]) for part in parts])
        return super().training_step(next(part for part in parts if part is not None), batch_idx)


def _train(folder: Path, data: Any, window: int, start: Path | None = None) -> list[Any]:
    module = Reads()
    callbacks = [] if start else [Checkpoint(folder, every_n_train_steps=1, save_top_k=-1)]
    trainer = fit(folder, max_epochs=2, accumulate_grad_batches=window, callbacks=callbacks)
    trainer.fit(module, data, ckpt_path=start)
    return module.rows


@pytest.mark.parametrize(
    ("build", "window"),
    [
        pytest.param(lambda: CombinedLoader([Stateful(5), loader(8, shuffle=True)], "sequential"), 1, id="sequential"),
        pytest.param(lambda: CombinedLoader([Sized(5), stream(6)], "max_size"), 2, id="max_size"),
        pytest.param(lambda: CombinedLoader([Stateful(5), stateful()], "min_size"), 1, id="min_size"),
        # windows that do not divide an epoch
        pytest.param(lambda: CombinedLoader([Stateful(5), stateful()], "max_size_cycle"), 3, id="max_size_cycle"),
        pytest.param(lambda: {"a": Sized(4), "b": loader(8, shuffle=True, num_workers=1)}, 1, id="dict with workers"),
    ],
)
def test_a_combination_with_a_stateful_loader_resumes_once(build: Any, window: int, tmp_path: Path) -> None:  # S-02
    whole = _train(tmp_path / "whole", build(), window)
    saved = [folder for folder in (tmp_path / "whole").iterdir() if (folder / "manifest.json").exists()]
    resumed = 0
    for number, folder in enumerate(sorted(saved)[::3]):
        progress = load(folder).progress
        if progress["epoch"] < 2:
            left = whole[progress["micro_batches"] :]
            assert _train(tmp_path / str(number), build(), window, folder) == left, folder.name
            resumed += 1
    assert resumed >= 2
