"""A combination with a loader that saves its own position resumes each loader where it was, exactly once: S-02."""

from __future__ import annotations

import json
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
    """The same, with a length."""

    def __len__(self) -> int:
        return self.batches


class Reads(Tiny):
    """Records the first samples of each loader's batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list) else [batch]
        self.rows.append([None if part is None else int(part[0, 0]) for part in parts])
        return super().training_step(next(part for part in parts if part is not None), batch_idx)


PARTNERS: dict[str, Any] = {
    "map": lambda: loader(12, 2, shuffle=True),
    "workers": lambda: loader(12, 2, shuffle=True, num_workers=1),
    "stream": lambda: stream(6, 2),
    "stateful": lambda: DataLoader(Stateful(3), batch_size=None),
}


def _train(folder: Path, data: Any, window: int, start: Path | None = None) -> list[Any]:
    module, saver = Reads(), Checkpoint(folder, every_n_train_steps=1, save_top_k=-1)
    trainer = fit(folder, max_epochs=2, accumulate_grad_batches=window, callbacks=saver)
    trainer.fit(module, data, ckpt_path=start)
    return module.rows


def _assert_every_resume_reads_what_was_left(path: Path, make: Any, window: int) -> None:
    whole = _train(path / "whole", make(), window)
    saved = [folder for folder in (path / "whole").iterdir() if (folder / "manifest.json").exists()]
    resumed = 0
    for number, folder in enumerate(sorted(saved)[::2]):
        progress = load(folder).progress
        if progress["epoch"] < 2:
            left = whole[progress["micro_batches"] :]
            assert _train(path / str(number), make(), window, folder) == left, folder.name
            resumed += 1
    assert resumed >= 2


@pytest.mark.parametrize(
    ("mode", "partner", "kind", "window"),
    [
        ("min_size", "map", Stateful, 1),
        ("sequential", "map", Stateful, 1),
        ("max_size", "stream", Sized, 2),
        ("max_size_cycle", "stream", Sized, 2),
        ("min_size", "stateful", Stateful, 1),
        ("max_size_cycle", "stateful", Stateful, 3),  # windows that do not divide an epoch
        ("sequential", "stateful", Stateful, 3),
    ],
)
def test_a_stateful_loader_in_a_combination_resumes_once(
    mode: str, partner: str, kind: Any, window: int, tmp_path: Path
) -> None:  # S-02
    def make() -> Any:
        return CombinedLoader([kind(5), PARTNERS[partner]()], mode)

    _assert_every_resume_reads_what_was_left(tmp_path, make, window)


@pytest.mark.parametrize("partner", ["workers", "nested"])
def test_a_dict_or_list_with_a_stateful_loader_resumes_once(partner: str, tmp_path: Path) -> None:  # S-02
    def make() -> Any:
        if partner == "nested":
            return CombinedLoader({"outer": Stateful(5)}, "min_size")
        return {"a": Sized(4), "b": PARTNERS[partner]()}

    _assert_every_resume_reads_what_was_left(tmp_path, make, 1)


def test_a_checkpoint_without_positions_reads_the_rows_again(tmp_path: Path) -> None:  # S-02
    """Earlier versions saved the state of each loader, but not its place in the combination."""
    from drivetrain.data._loaders import prepare_loader

    source = prepare_loader(CombinedLoader([Stateful(5)], "min_size"), training=True)
    batches = source.epoch(0)
    next(batches), next(batches)
    state = json.loads(json.dumps(source.state_dict()))
    del state["positions"]
    resumed = prepare_loader(CombinedLoader([Stateful(5)], "min_size"), training=True)
    resumed.load_state_dict(state)
    assert [int(batch[0][0, 0]) for batch, _ in resumed.epoch(0, 2)] == [102, 103, 104]
