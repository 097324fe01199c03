"""Checkpoint: saves before the first validation (Q-05), and scores of the saved weights (S-04)."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from callback_modules import Validated, failing, folders, loader, saving, train

from drivetrain import ConfigurationError, Fit
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load, verify

FOUR: dict[str, Any] = {"monitor": "val_loss", "every_n_train_steps": 4}
ALL = {"save_top_k": -1}


def fit(root: Path, callbacks: Any, scores: list[float], **options: Any) -> Fit:
    """Train ten steps an epoch, and log a score in each validation."""
    return train(root, callbacks, Validated(scores), loader(), loader(8), **options)


TIMED = {"monitor": "val_loss", "train_time_interval": timedelta(microseconds=1)}
EPOCHS = {"monitor": "val_loss", "every_n_epochs": 1}
NAMED = {"filename": "{epoch}-{val_loss:.1f}", "every_n_train_steps": 4}
SECOND = {"check_val_every_n_epoch": 2}


@pytest.mark.parametrize(
    ("options", "settings", "saved"),
    [
        pytest.param(FOUR | ALL, {"num_sanity_val_steps": 1}, ["epoch=0-step=10", "epoch=1-step=20"], id="steps"),
        pytest.param(FOUR | ALL | {"save_async": True}, {}, ["epoch=0-step=10", "epoch=1-step=20"], id="background"),
        pytest.param(TIMED, SECOND, ["epoch=1-step=20"], id="time"),
        pytest.param(EPOCHS, {"max_epochs": 4, **SECOND}, ["epoch=3-step=40"], id="an epoch without validation"),
        pytest.param(NAMED, {"max_epochs": 1}, ["epoch=0-val_loss=0.7"], id="a value in the name"),
        pytest.param({"monitor": "val_loss"}, {"max_epochs": -1, "max_steps": 3}, ["epoch=0-step=3"], id="the end"),
        pytest.param(
            {**FOUR, "monitor": "train_loss"}, {"max_epochs": 1}, ["epoch=0-step=8"], id="no wait in training"
        ),
    ],
)
def test_a_due_save_waits_for_the_validation(
    options: dict[str, Any], settings: dict[str, Any], saved: list[str], tmp_path: Path
) -> None:
    # the first due save ended the run with "no value of that name was logged"
    fit(tmp_path, Checkpoint(tmp_path / "here", **options), [0.7, 0.4, 0.3, 0.2], **{"max_epochs": 2, **settings})
    assert folders(tmp_path / "here") == saved


@pytest.mark.parametrize("score", [0.7, math.nan])
def test_the_newest_is_kept_without_a_score_until_then(score: float, tmp_path: Path) -> None:
    # keep_last and save_last do not depend on the monitored value, so a killed run loses no more than before
    newest = Checkpoint(tmp_path / "here", "{step}-{val_loss:.1f}", save_last=True, **FOUR)
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, [newest, failing(9)], [score], max_epochs=2)
    assert folders(tmp_path / "here") == ["step=8-val_loss=nan"]
    assert newest.best_model_score is None
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, [newest, failing(17)], [score], ckpt_path=newest.last_model_path, max_epochs=2)
    assert newest.best_model_score == pytest.approx(score, nan_ok=True)
    assert folders(tmp_path / "here") == [f"step=10-val_loss={score}", "step=16-val_loss=nan"]


def test_without_its_validation_the_last_state_is_saved_without_a_score(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = Checkpoint(tmp_path / "here", **FOUR)
    fit(tmp_path, checkpoint, [], max_epochs=2, check_val_every_n_epoch=5)
    assert folders(tmp_path / "here") == ["epoch=1-step=20"]
    assert checkpoint.best_model_score is None
    assert verify(checkpoint.best_model_path) == []
    (waits,) = [record.getMessage() for record in caplog.records if "waits" in record.getMessage()]
    assert "monitor='val_loss'" in waits
    assert "step 4" in waits
    assert caplog.text.count("without a score") == 1


def test_a_save_waits_for_a_value_of_the_epochs_end(tmp_path: Path) -> None:
    # the value comes after the validation for which the save waited
    class Epochs(Validated):
        def on_train_epoch_end(self) -> None:
            self.log("whole", 2.0)

    checkpoint = Checkpoint(monitor="whole", every_n_train_steps=8)
    train(tmp_path, checkpoint, Epochs([0.7]), loader(), loader(8))
    assert checkpoint.best_model_score == 2.0


@pytest.mark.parametrize(
    ("monitor", "options", "message"),
    [
        pytest.param("val_los", {}, r"'val_los'.*\n?.*Did you mean 'val_loss'", id="a wrong name"),
        pytest.param("val_loss", {"limit_val_batches": 0}, "monitor='val_loss'", id="no validation"),
    ],
)
def test_a_value_that_will_not_come_ends_the_run(
    monitor: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(tmp_path, Checkpoint(monitor=monitor, every_n_train_steps=4), [0.7], **options)


def test_a_resumed_run_saves_at_the_validation_that_the_earlier_run_waited_for(tmp_path: Path) -> None:
    # the run was saved between the due save and the validation
    def checkpoint() -> Checkpoint:
        return Checkpoint(tmp_path / "here", monitor="val_loss", every_n_train_steps=7)

    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, [checkpoint(), saving(8, tmp_path / "aside"), failing(9)], [])
    fit(tmp_path, checkpoint(), [0.7], ckpt_path=tmp_path / "aside")
    assert folders(tmp_path / "here") == ["epoch=0-step=10"]


def test_two_callbacks_in_one_folder_get_different_names(tmp_path: Path) -> None:
    folder = "memory://two-callbacks"
    best, steps = Checkpoint(folder, monitor="val_loss"), Checkpoint(folder, every_n_train_steps=10)
    fit(tmp_path, [best, steps], [0.7])
    paths = {best.best_model_path, steps.best_model_path}
    assert paths == {f"{folder}/epoch=0-step=10", f"{folder}/epoch=0-step=10-v1"}
    assert load(best.best_model_path).progress["epoch"] == 1
    assert load(steps.best_model_path).progress["batch_idx"] == 10
