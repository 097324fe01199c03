"""ckpt_path="best" of a fresh Fit: the best of the newest run, and an error if it monitored no value."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from run_case import Another, Net, data, fit, trained

from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load
from drivetrain.errors import CheckpointError


def monitored(**options: Any) -> Checkpoint:
    return Checkpoint(monitor="loss_epoch", save_last=True, mode="max", **options)


def loads_weights_of(path: str, root: Path, **options: Any) -> bool:
    """Test a fresh module with ckpt_path="best", and return whether it has the weights of a checkpoint."""
    module = Net()
    fit(root, **options).test(module, data(), ckpt_path="best", verbose=False)
    return torch.equal(module.net.weight, load(path).weights()["net.weight"])


@pytest.mark.parametrize("stage", ["test", "validate", "predict"])
def test_without_a_run_that_monitored_it_is_refused(stage: str, tmp_path: Path, caplog: Any) -> None:
    trained(tmp_path, callbacks=Checkpoint())
    trained(tmp_path, module=Another(), callbacks=monitored())  # another class, which is not considered
    with pytest.raises(CheckpointError, match=r"ckpt_path='best'[\s\S]*version_0 \([\s\S]*monitor=") as caught:
        getattr(fit(tmp_path), stage)(Net(), data(), ckpt_path="best")
    assert "ckpt_path='last'" in caught.value.fix
    (line,) = [one.getMessage() for one in caplog.records if "ckpt_path='best'" in one.getMessage()]
    assert line.startswith("ckpt_path='best': no checkpoint. Skipped: version_1 (")


def test_the_callback_that_monitored_decides_and_not_the_first(tmp_path: Path) -> None:
    best = monitored(filename="best-{epoch}")
    trained(tmp_path, callbacks=[Checkpoint(every_n_train_steps=2), best], max_epochs=3)
    assert loads_weights_of(best.best_model_path, tmp_path)


def test_the_best_is_found_in_a_folder_that_this_fit_names(tmp_path: Path) -> None:
    best = monitored(dirpath=tmp_path / "best")
    trained(tmp_path, callbacks=[best, Checkpoint(every_n_train_steps=1, save_top_k=-1)], max_epochs=2)
    assert loads_weights_of(best.best_model_path, tmp_path, callbacks=[Checkpoint(tmp_path / "best")])


def test_a_best_checkpoint_that_is_gone_is_not_replaced_by_the_newest(tmp_path: Path) -> None:
    best = trained(tmp_path, callbacks=monitored(), max_epochs=3).checkpoint_callback
    assert best is not None
    shutil.rmtree(best.best_model_path)
    with pytest.raises(CheckpointError, match=r"version_0 \(its best checkpoint, 'epoch=0-step=6', is not"):
        loads_weights_of(best.best_model_path, tmp_path)
