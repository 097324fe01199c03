"""Files and folders of a run have the permissions of the user's umask, and digests on request (J-11)."""

from __future__ import annotations

import logging
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import fit, loader, regression
from small_modules import Logs, calling, linear

from drivetrain._runs.checkpoint_folders import claim_name
from drivetrain._storage.publication import LocalPublication
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import consolidate, convert, verify
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


def test_files_of_ranks_follow_the_umask(tmp_path: Path) -> None:  # J-11
    with files_with(0o027, tmp_path) as folder:
        ranks: dict[str, Any] = {"strategy": "ddp", "devices": 2, "accelerator": "cpu", "launcher": "fork"}
        warns = linear(on_fit_start=lambda self: logging.getLogger("drivetrain").warning("rank %d", self.global_rank))
        fit(folder, callbacks=Checkpoint(folder / "c"), **ranks).fit(warns, regression())
    names = {path.name for path in folder.rglob("*")}
    assert {"run.json", "rank-0.log", "rank-1.log", "manifest.json"} <= names


def test_temporary_files_follow_the_umask(tmp_path: Path) -> None:  # J-11
    with files_with(0o077, tmp_path) as folder:
        claim_name(str(folder), "name", lambda taken: False)
        place = LocalPublication.begin(folder / "c")
        with place.folder.create("model.safetensors") as file:
            file.write(b"half of it")
    assert len(list(folder.rglob("*"))) == 4  # two locks, a folder and a file


@pytest.mark.parametrize(("error", "save_async"), [(RuntimeError, True), (SystemExit, False)])
def test_a_checkpoint_callback_writes_digests(tmp_path: Path, error: Any, save_async: bool) -> None:  # J-11
    """Including those written before a preempted exit and after a failure."""

    def end(trainer: Any) -> None:
        if trainer.global_step == 5:
            if error is SystemExit:
                signal.raise_signal(signal.SIGTERM)
            else:
                raise RuntimeError("enough")

    options: dict[str, Any] = {"digest": "sha256", "save_async": save_async, "save_top_k": -1}
    saver = Checkpoint(tmp_path / "c", every_n_train_steps=2, save_on_exception=True, **options)
    with pytest.raises(error):
        fit(tmp_path, callbacks=[saver, calling("on_train_batch_start", end)]).fit(linear(), regression(400))
    paths = [path for path in (tmp_path / "c").iterdir() if path.is_dir()]
    assert len(paths) >= 3
    assert [verify(path) for path in paths] == [[]] * len(paths)
