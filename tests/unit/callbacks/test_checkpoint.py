"""Checkpoint: when it saves, what it keeps, and how a run resumes (F-07, F-08, F-15, F-16)."""

from __future__ import annotations

import math
import shutil
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_modules import CHECKPOINTS, Regression, Scored, Validated, checkpoint_names, folders, loader, train

from drivetrain import CheckpointError, ConfigurationError
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load, verify

SOON = timedelta(microseconds=1)


@pytest.mark.parametrize(
    ("when", "options", "saved"),
    [
        pytest.param({"every_n_train_steps": 4}, {"max_epochs": 2}, ["0-step=4", "1-step=12", "1-step=8"], id="steps"),
        pytest.param(
            {"every_n_train_steps": 1}, {"accumulate_grad_batches": 4}, ["0-step=1", "0-step=2"], id="windows"
        ),
        pytest.param({"every_n_epochs": 2}, {"max_epochs": 5}, ["1-step=12", "3-step=24"], id="epochs"),
        pytest.param({"train_time_interval": SOON}, {"max_epochs": 7}, ["2-step=16", "5-step=32"], id="time"),
    ],
)
def test_when_it_saves(when: dict[str, Any], options: dict[str, Any], saved: list[str], tmp_path: Path) -> None:
    train(tmp_path, Checkpoint(save_top_k=-1, **when), **options)
    assert checkpoint_names(tmp_path) == [f"epoch={name}" for name in saved]
    if "accumulate_grad_batches" in options:
        assert load(tmp_path / CHECKPOINTS / "epoch=0-step=1").progress["batch_idx"] == 4


def test_the_newest_is_kept_and_named_in_latest(tmp_path: Path) -> None:
    checkpoint, folder = Checkpoint(), tmp_path / CHECKPOINTS
    train(tmp_path, [checkpoint, Checkpoint(tmp_path / "none", save_top_k=0)], max_epochs=3)
    assert (folders(folder), (folder / "latest").read_text()) == (["epoch=2-step=18"], "epoch=2-step=18")
    assert checkpoint.best_model_path == checkpoint.last_model_path == str(folder / "epoch=2-step=18")
    assert verify(checkpoint.best_model_path) == []
    assert not (tmp_path / "none").exists()


def test_it_saves_after_each_of_several_validations(tmp_path: Path) -> None:
    loaders = loader(6, 1), loader(1, 1)
    train(tmp_path, Checkpoint(save_top_k=-1), Validated([0.0] * 3), *loaders, val_check_interval=2)
    assert checkpoint_names(tmp_path) == ["epoch=0-step=2", "epoch=0-step=4", "epoch=0-step=6"]


NAN = math.nan


@pytest.mark.parametrize(
    ("options", "scores", "kept"),
    [
        pytest.param({"save_top_k": 2}, [3.0, 1.0, 4.0, 2.0], [1, 3], id="the best"),
        pytest.param({"mode": "max", "keep_last": 2}, [3.0, 5.0, 4.0, 2.0], [1, 2, 3], id="the best and the newest"),
        pytest.param({"save_top_k": 2}, [1.0, 1.0, 1.0, 0.0], [0, 3], id="the earlier of equal scores"),
        pytest.param({"save_top_k": 2, "mode": "max"}, [1.0, 1.0, 1.0, 2.0], [0, 3], id="the earlier of equal highest"),
        pytest.param({"save_last": True}, [0.7, 0.7, 0.7], [0, 2], id="equal scores and the newest"),
        pytest.param({}, [NAN, 1.0, NAN], [1], id="NaN is the worst"),
        pytest.param({"mode": "max"}, [NAN, 1.0, NAN], [1], id="NaN is the worst where more is better"),
        pytest.param({}, [NAN, NAN], [0], id="NaN equals NaN"),
    ],
)
def test_what_is_kept(options: dict[str, Any], scores: list[float], kept: list[int], tmp_path: Path) -> None:
    # F-07, Q-05
    checkpoint = Checkpoint(monitor="score", filename="{epoch}", **options)
    train(tmp_path, checkpoint, Scored(scores), max_epochs=len(scores))
    assert checkpoint_names(tmp_path) == [f"epoch={epoch}" for epoch in kept]
    choose = max if options.get("mode") == "max" else min
    best = choose(kept, key=lambda epoch: scores[epoch])
    assert checkpoint.best_model_score == pytest.approx(scores[best], nan_ok=True)
    assert checkpoint.best_model_path.endswith(f"epoch={best}")
    assert checkpoint.last_model_path.endswith(f"epoch={kept[-1]}")
    assert list(checkpoint.best_k_models.values()) == pytest.approx([scores[epoch] for epoch in kept], nan_ok=True)


def test_what_others_wrote_stays(tmp_path: Path) -> None:  # F-07, F-15, F-16
    folder = tmp_path / "checkpoints"
    (folder / "best").mkdir(parents=True)
    (folder / "tmp").mkdir()
    for epochs in (1, 2, 1):
        train(tmp_path, Checkpoint(folder), max_epochs=epochs)
    assert folders(folder) == ["best", "epoch=0-step=6", "epoch=0-step=6-v1", "epoch=1-step=12", "tmp"]


@pytest.mark.parametrize("another_run", [False, True])
def test_a_resumed_run_removes_what_a_killed_run_was_about_to_remove(another_run: bool, tmp_path: Path) -> None:
    # F-05, F-07: killed after the second checkpoint was complete and before the first was removed
    first, aside = tmp_path / CHECKPOINTS / "epoch=0-step=6", tmp_path / "aside"
    train(tmp_path, Checkpoint())
    shutil.copytree(first, aside)
    train(tmp_path, Checkpoint(), max_epochs=2, ckpt_path="auto")
    assert checkpoint_names(tmp_path) == ["epoch=1-step=12"]
    if another_run:
        train(tmp_path / "other", Checkpoint(tmp_path / "theirs"))
        aside = tmp_path / "theirs/epoch=0-step=6"
    shutil.copytree(aside, first)
    train(tmp_path, Checkpoint(), max_epochs=3, ckpt_path=tmp_path / CHECKPOINTS / "epoch=1-step=12")
    assert checkpoint_names(tmp_path) == ["epoch=0-step=6"] * another_run + ["epoch=2-step=18"]


def test_two_callbacks_of_one_class_keep_their_own_lists(tmp_path: Path) -> None:  # F-12, F-16
    def callbacks() -> list[Any]:
        best = Checkpoint(monitor="score", filename="best-{epoch}")
        return [best, Checkpoint(every_n_train_steps=5, filename="steps-{step}")]

    train(tmp_path, callbacks(), Scored([1.0, 2.0]), max_epochs=2)
    assert checkpoint_names(tmp_path) == ["best-epoch=0", "steps-step=10"]
    train(tmp_path, callbacks(), Scored([1.0, 2.0, 0.5]), max_epochs=3, ckpt_path="last")
    assert checkpoint_names(tmp_path) == ["best-epoch=2", "steps-step=15"]


def test_saving_after_a_resume_does_not_collide(tmp_path: Path) -> None:  # F-15
    def identifiers() -> dict[str, str]:
        return {name: load(folder / name).manifest.identifier for name in folders(folder)}

    folder, steps = tmp_path / CHECKPOINTS, {"every_n_train_steps": 2, "save_top_k": -1}
    train(tmp_path, Checkpoint(**steps))  # type: ignore[arg-type]
    before = identifiers()
    other = type("Other", (Checkpoint,), {})  # a class with its own state key
    train(tmp_path, other(folder, **steps), ckpt_path=folder / "epoch=0-step=2")
    after = identifiers()
    assert after.items() >= before.items()
    assert sorted(set(after) - set(before)) == ["epoch=0-step=4-v1", "epoch=0-step=6-v1"]


def _writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "checkpoint-write"]


def test_in_the_background_the_state_at_the_call_is_saved(tmp_path: Path) -> None:  # F-08
    class Adam(Scored):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    plain = Checkpoint(tmp_path / "plain", every_n_train_steps=2, save_top_k=-1)
    beside = Checkpoint(tmp_path / "beside", every_n_train_steps=2, save_top_k=-1, save_async=True)
    train(tmp_path, [plain, beside], Adam(), max_epochs=2)
    assert len(folders(tmp_path / "plain")) == 6
    for name in folders(tmp_path / "plain"):
        expected, found = load(tmp_path / "plain" / name), load(tmp_path / "beside" / name)
        assert verify(found.path) == []
        assert expected.progress == found.progress
        torch.testing.assert_close(found.weights(), expected.weights(), rtol=0, atol=0)
        moments = [saved.optimizer_state()["state"]["net.weight"]["exp_avg"] for saved in (expected, found)]
        assert torch.equal(*moments)
    assert not _writers()


class Replaced(Checkpoint):
    """Replaces its folder by a file after the folder was checked."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        super().on_train_start(trainer, module)
        Path(str(self.dirpath)).write_text("")


@pytest.mark.parametrize(
    ("every", "step"), [pytest.param(2, 3, id="within a step"), pytest.param(6, 6, id="at the end")]
)
def test_a_failure_in_the_background_surfaces(every: int, step: int, tmp_path: Path) -> None:  # F-08
    steps: list[int] = []

    class Blocked(Regression):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            steps.append(self.global_step)
            for thread in _writers():
                thread.join()

    checkpoint = Replaced(tmp_path / "file", every_n_train_steps=every, save_async=True)
    with pytest.raises(CheckpointError, match="could not be written"):
        train(tmp_path, checkpoint, Blocked())
    assert steps[-1] == step


def test_names_are_filled_with_values() -> None:
    values = {"epoch": 3, "val/loss": 0.256}
    named = Checkpoint(filename="{epoch:03d}-{val/loss:.2f}")
    assert named.format_checkpoint_name(values) == "epoch=003-val_loss=0.26"
    with pytest.raises(ConfigurationError, match=r"no value 'val_los' was logged.*val/loss"):
        named.format_checkpoint_name(values, "{val_los}")


@pytest.mark.parametrize("dirpath", ["d" * 300, "é" * 200, "a\0b"])
def test_a_folder_that_cannot_be_created_is_refused_before_the_first_step(dirpath: str, tmp_path: Path) -> None:
    module = Scored()
    with pytest.raises(ConfigurationError, match="cannot write to"):
        train(tmp_path, Checkpoint(f"{tmp_path}/missing/{dirpath}"), module)
    assert module.started == []


def test_a_monitored_value_that_nobody_logged_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"monitor='scroe'.*'score'"):
        train(tmp_path, Checkpoint(monitor="scroe"))
