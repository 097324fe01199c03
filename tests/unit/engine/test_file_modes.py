"""Files and folders of a run have the permissions of the user's umask (J-11)."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from engine_case import fit, loader
from small_modules import Logs

from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import consolidate, convert

# Private: the files in the middle of a save.
from drivetrain.checkpoint._folders import claim_name
from drivetrain.checkpoint._format.local_storage import LocalStorage
from drivetrain.loggers import CSVLogger, TensorBoardLogger


@contextmanager
def files_with(mask: int, path: Path) -> Iterator[Path]:
    """Yield a folder, in which all paths must have the permissions of an ordinary file or folder under the umask."""
    folder = path / "made"
    folder.mkdir(mode=0o777)
    before = os.umask(mask)
    try:
        yield folder
    finally:
        os.umask(before)
    assert list(folder.rglob("*"))
    for one in folder.rglob("*"):
        mode = one.lstat().st_mode
        assert stat.S_IMODE(mode) == (0o777 if stat.S_ISDIR(mode) else 0o666) & ~mask, one


@pytest.mark.parametrize(("mask", "save_async"), [(0o002, False), (0o077, True)])
def test_files_and_folders_follow_the_umask(tmp_path: Path, mask: int, save_async: bool) -> None:  # J-11
    with files_with(mask, tmp_path) as folder:
        loggers = [CSVLogger(folder / "logs", flush_logs_every_n_steps=1), TensorBoardLogger(folder / "board")]
        every = Checkpoint(folder / "c", every_n_train_steps=1, save_top_k=2, save_async=save_async)
        trainer = fit(folder, logger=loggers, callbacks=every, log_every_n_steps=1)
        module = Logs()
        module.save_hyperparameters({"width": 3})
        trainer.fit(module, loader())
        for _ in range(2):  # the second time over existing files
            trainer.save_checkpoint(folder / "by-hand" / "end", weights_only=True)
        consolidate(folder / "by-hand" / "end", folder / "one" / "all.safetensors")
        torch.save({"state_dict": {"w": torch.ones(2)}}, tmp_path / "theirs.ckpt")
        convert(tmp_path / "theirs.ckpt", folder / "converted")
    names = {path.name for path in folder.rglob("*")}
    assert {"latest", "manifest.json", "model.safetensors", "metrics.csv", "hparams.json", "all.safetensors"} <= names
    assert any(name.startswith("events.out") for name in names)


def test_temporary_files_follow_the_umask(tmp_path: Path) -> None:  # J-11
    with files_with(0o077, tmp_path) as folder:
        claim_name(str(folder), "name", lambda taken: False)
        place = LocalStorage.begin(str(folder / "c"))
        with place.open("model.safetensors") as file:
            file.write(b"half of it")
    assert len(list(folder.rglob("*"))) == 4  # two locks, a folder and a file
