"""Files and folders of a run have the permissions of the user's umask (J-11)."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Tiny, fit, loader

from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import consolidate, convert

# Private: the files in the middle of a save.
from drivetrain.checkpoint._folders import claim_name
from drivetrain.checkpoint._format.local_storage import LocalStorage
from drivetrain.loggers import CSVLogger, TensorBoardLogger
from worlds import on_ranks


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder: Path) -> dict[str, tuple[bool, int]]:
    """Return for each path below a folder whether it is a folder, and its permissions."""
    found = {str(path.relative_to(folder)): path.lstat().st_mode for path in folder.rglob("*")}
    return {name: (stat.S_ISDIR(mode), stat.S_IMODE(mode)) for name, mode in found.items()}


def others_than(mask: int, folder: Path) -> list[str]:
    """Return the paths whose permissions differ from those of an ordinary file or folder."""
    found = modes(folder)
    assert found
    return [name for name, (is_folder, mode) in found.items() if mode != (0o777 if is_folder else 0o666) & ~mask]


class Named(Tiny):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 1.0)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("mask", "save_async"), [(0o002, False), (0o022, True), (0o077, True)])
def test_files_and_folders_follow_the_umask(tmp_path: Path, mask: int, save_async: bool) -> None:  # J-11
    folder = tmp_path / "made"
    folder.mkdir()
    folder.chmod(0o777)
    with umask(mask):
        loggers = [CSVLogger(folder / "logs", flush_logs_every_n_steps=1), TensorBoardLogger(folder / "board")]
        every = Checkpoint(folder / "c", every_n_train_steps=1, save_top_k=2, save_async=save_async)
        trainer = fit(folder, logger=loggers, callbacks=every, log_every_n_steps=1)
        trainer.fit(Named(), loader())
        for _ in range(2):  # the second time over existing files
            trainer.save_checkpoint(folder / "by-hand" / "end", weights_only=True)
        consolidate(folder / "by-hand" / "end", folder / "one" / "all.safetensors")
        torch.save({"state_dict": {"w": torch.ones(2)}}, tmp_path / "theirs.ckpt")
        convert(tmp_path / "theirs.ckpt", folder / "converted")
    assert others_than(mask, folder) == []
    names = {Path(name).name for name in modes(folder)}
    assert {"latest", "manifest.json", "model.safetensors", "metrics.csv", "hparams.json", "all.safetensors"} <= names
    assert any(name.startswith("events.out") for name in names)


@pytest.mark.parametrize("mask", [0o002, 0o077], ids=oct)
def test_temporary_files_follow_the_umask(tmp_path: Path, mask: int) -> None:  # J-11
    folder = tmp_path / "made"
    folder.mkdir()
    with umask(mask):
        _, give_up = claim_name(str(folder), "name", lambda taken: False)
        place = LocalStorage.begin(str(folder / "c"))
        with place.open("model.safetensors") as file:
            file.write(b"half of it")
            found = modes(folder)
        assert others_than(mask, folder) == []
        place.abandon()
        give_up()
    assert len(found) == 4  # two locks, a folder and a file


def _on_a_rank(folder: Path, mask: int) -> None:
    with umask(mask):
        every = Checkpoint(folder / "c", every_n_train_steps=2)
        trainer = fit(folder, strategy="ddp", devices=2, accelerator="cpu", callbacks=every)

        class Warns(Named):
            def on_fit_start(self) -> None:
                logging.getLogger("drivetrain").warning("for the log of rank %d", self.global_rank)

        trainer.fit(Warns(), loader())


def test_files_of_ranks_follow_the_umask(tmp_path: Path) -> None:  # J-11
    mask = 0o027
    folder = tmp_path / "made"
    folder.mkdir()
    on_ranks(_on_a_rank, 2, folder, mask)
    assert others_than(mask, folder) == []
    run = "drivetrain_logs/version_0"
    assert {f"{run}/run.json", f"{run}/logs/rank-0.log", f"{run}/logs/rank-1.log"} <= set(modes(folder))
