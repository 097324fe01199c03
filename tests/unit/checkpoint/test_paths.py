"""Paths: the home folder, names with colons, and files that are closed again (J-12)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_case import OneLayer, quiet

from drivetrain import Fit
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load, verify
from drivetrain.checkpoint._format.storage import filesystem_of  # a chained URL needs a cache folder of its own to use
from drivetrain.loggers import CSVLogger


def trained(epochs: int = 1, start: str | None = None, **options: Any) -> Fit:
    trainer = quiet(max_epochs=epochs, seed=1, **options)
    trainer.fit(OneLayer(64, 64), list(torch.randn(4, 2, 64)), ckpt_path=start)
    return trainer


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder; the working directory is another one."""
    for name in ("home", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def test_a_tilde_is_the_home_folder(home: Path) -> None:
    # J-12
    trainer = trained(callbacks=Checkpoint("~/kept"), logger=CSVLogger("~/logs"), log_every_n_steps=1)
    trainer.save_checkpoint("~/by-hand", weights_only=True)
    trained(callbacks=Checkpoint(), default_root_dir="~/root")
    assert list(Path().iterdir()) == []
    assert verify("~/by-hand") == []
    assert (home / "kept/epoch=0-step=4/manifest.json").exists()
    assert (home / "root/drivetrain_logs/version_0/checkpoints/epoch=0-step=4/manifest.json").exists()
    assert len(list((home / "logs").rglob("metrics.csv"))) == 1
    assert trained(2, "~/kept/epoch=0-step=4", callbacks=Checkpoint("~/kept")).global_step == 8


@pytest.mark.usefixtures("home")
def test_a_name_with_colons_is_a_folder_and_a_resumed_run_closes_the_files_that_it_read() -> None:
    # J-12
    held: list[str] = []

    class OpenFiles(Checkpoint):
        def on_train_end(self, trainer: object, module: object) -> None:
            held.extend(Path("/proc/self/maps").read_text().splitlines())
            held.extend(os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink())

    trained(callbacks=Checkpoint("exp::1"))
    assert load("exp::1/epoch=0-step=4").progress["epoch"] == 1
    assert filesystem_of("simplecache::memory://bucket/run")[0] is not None
    trained(2, "exp::1/epoch=0-step=4", callbacks=OpenFiles("exp::1"))
    assert held
    assert not [line for line in held if "epoch=0-step=4" in line]
