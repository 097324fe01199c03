"""Which of our files a save and a start enter, in the order of docs/architecture.md, and the calls between files."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Fit, TrainModule
from drivetrain.loggers import CSVLogger

ROOT = Path(__file__).parents[3]
PACKAGES = tuple(f"{ROOT / folder}/" for folder in ("framework/drivetrain", "strategies"))


class Entered:
    """The files in the order in which they are first entered, and the number of calls from one file into another."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.crossings = 0

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_flags & inspect.CO_OPTIMIZED:  # not the body of a module or a class
            return
        file, outer = _our_file(frame), frame.f_back
        if file is None:
            return
        while outer is not None and _our_file(outer) is None:  # a call through another package is one of our file too
            outer = outer.f_back
        if file not in self.files:
            self.files.append(file)
        self.crossings += outer is not None and _our_file(outer) != file

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count in the block, in this thread."""
        sys.setprofile(self._count)
        try:
            yield
        finally:
            sys.setprofile(None)


def _our_file(frame: FrameType | None) -> str | None:
    name = "" if frame is None else frame.f_code.co_filename
    return next((name.removeprefix(package) for package in PACKAGES if name.startswith(package)), None)


def files_in_docs(title: str) -> list[str]:
    """Return the files that a section of docs/architecture.md names in its numbered list."""
    section = (ROOT / "docs" / "architecture.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"`([\w/]+\.py)`", section)


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class SavesAtTheEnd(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.entered = Entered()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        with self.entered.counted():
            trainer.save_checkpoint(self.path)


def test_a_save_enters_few_files(tmp_path: Path) -> None:  # K-05
    saves = SavesAtTheEnd(tmp_path / "c")
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 1, "accelerator": "cpu", "max_epochs": 1}
    logger = CSVLogger(tmp_path / "logs")
    fit = Fit(**settings, callbacks=[saves], logger=logger, default_root_dir=tmp_path, enable_progress_bar=False)
    fit.fit(Net(), DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4))
    entered = saves.entered
    assert len(entered.files) <= 40, entered.files
    assert entered.crossings <= 150
    assert files_in_docs("One save") == entered.files


class EndsTheCount(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sys.setprofile(None)
        return super().training_step(batch, batch_idx)


def test_a_start_enters_few_files(tmp_path: Path) -> None:  # K-05
    data, entered = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4), Entered()
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 1, "accelerator": "cpu", "max_epochs": 1}
    Fit(**settings, default_root_dir=tmp_path).fit(Net(), data)  # imports
    module = EndsTheCount()
    with entered.counted():
        Fit(**settings, default_root_dir=tmp_path).fit(module, data)
    assert len(entered.files) <= 110, entered.files
    assert entered.crossings <= 700
    assert files_in_docs("The files of a start") == entered.files
