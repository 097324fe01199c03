"""Checkpoint: when it saves, what it keeps and removes, how a run resumes, and saves that wait (Q-05, Q-09, J-01)."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from callback_modules import CHECKPOINTS, Scored, Validated, checkpoint_names, failing, folders, loader, saving, train

from drivetrain import Callback, CheckpointError, ConfigurationError, Fit
from drivetrain.callbacks import Checkpoint, LambdaCallback
from drivetrain.checkpoint import load, verify
from faulty_store import FaultyStore

NAN, SOON = math.nan, timedelta(microseconds=1)
ALL, EACH, SECOND = {"save_top_k": -1}, {"every_n_train_steps": 1}, {"check_val_every_n_epoch": 2}
AWAITED: dict[str, Any] = {"monitor": "val_loss", "every_n_train_steps": 4}
TIMED = {"monitor": "val_loss", "train_time_interval": SOON}
EPOCHS = {"monitor": "val_loss", "every_n_epochs": 1}
NAMED = {"filename": "{epoch}-{val_loss:.1f}", "every_n_train_steps": 4}
FOUR = {"every_n_train_steps": 4}
WEIGHTS = FOUR | {"save_weights_only": True}
GONE = [FOUR]
WHOLE = {"filename": "{whole:.1f}", "every_n_train_steps": 8, "monitor": "whole"}


@pytest.mark.parametrize(
    ("when", "options", "saved"),
    [
        pytest.param({"every_n_train_steps": 4}, {"max_epochs": 2}, ["0-step=4", "1-step=12", "1-step=8"], id="steps"),
        pytest.param(EACH, {"accumulate_grad_batches": 4}, ["0-step=1", "0-step=2"], id="windows"),
        pytest.param({}, {"val_check_interval": 2}, ["0-step=2", "0-step=4", "0-step=6"], id="validations"),
        pytest.param({"every_n_epochs": 2}, {"max_epochs": 5}, ["1-step=12", "3-step=24"], id="epochs"),
        pytest.param({"train_time_interval": SOON}, {"max_epochs": 7}, ["2-step=16", "5-step=32"], id="time"),
        pytest.param({"every_n_epochs": 0}, {}, [], id="not at epochs"),
        pytest.param({"every_n_train_steps": 0}, {}, [], id="not at steps"),
        pytest.param({"save_on_train_epoch_end": True}, SECOND, ["0-step=6", "1-step=12"], id="ends of epochs"),
        pytest.param({"save_on_train_epoch_end": False}, SECOND, ["1-step=12"], id="ends of validations"),
    ],
)
def test_when_it_saves(when: dict[str, Any], options: dict[str, Any], saved: list[str], tmp_path: Path) -> None:  # L-10
    epochs = {"max_epochs": 2} if options is SECOND else {}
    train(tmp_path, Checkpoint(save_top_k=-1, **when), None, loader(6, 1), loader(1, 1), **options, **epochs)
    found = sorted(one.parent.name for one in (tmp_path / CHECKPOINTS).glob("*/manifest.json"))
    assert found == [f"epoch={name}" for name in saved]
    if "accumulate_grad_batches" in options:
        assert load(tmp_path / CHECKPOINTS / "epoch=0-step=1").progress["batch_idx"] == 4


def test_the_newest_is_kept_and_named_in_latest(tmp_path: Path) -> None:
    checkpoint, folder = Checkpoint(), tmp_path / CHECKPOINTS
    train(tmp_path, [checkpoint, Checkpoint(tmp_path / "none", save_top_k=0)], max_epochs=3)
    assert (folders(folder), (folder / "latest").read_text()) == (["epoch=2-step=18"], "epoch=2-step=18")
    assert checkpoint.best_model_path == checkpoint.last_model_path == str(folder / "epoch=2-step=18")
    assert verify(checkpoint.best_model_path) == []
    assert not (tmp_path / "none").exists()


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
def test_what_is_kept(options: Any, scores: list[float], kept: list[int], tmp_path: Path) -> None:  # F-07, Q-05
    checkpoint = Checkpoint(monitor="score", filename="{epoch}", **options)
    train(tmp_path, checkpoint, Scored(scores), max_epochs=len(scores))
    assert checkpoint_names(tmp_path) == [f"epoch={epoch}" for epoch in kept]
    choose = max if options.get("mode") == "max" else min
    best = choose(kept, key=lambda epoch: scores[epoch])
    assert checkpoint.best_model_score == pytest.approx(scores[best], nan_ok=True)
    assert checkpoint.best_model_path.endswith(f"epoch={best}")
    assert checkpoint.last_model_path.endswith(f"epoch={kept[-1]}")
    assert list(checkpoint.best_k_models.values()) == pytest.approx([scores[epoch] for epoch in kept], nan_ok=True)
    if kept == [1, 3]:
        assert (checkpoint.kth_value, checkpoint.current_score) == (2.0, 2.0)
        assert checkpoint.kth_best_model_path.endswith("epoch=3")


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
    for epochs, names in ((2, ["best-epoch=0", "steps-step=10"]), (3, ["best-epoch=2", "steps-step=15"])):
        best = Checkpoint(monitor="score", filename="best-{epoch}")
        steps = Checkpoint(every_n_train_steps=5, filename="steps-{step}")
        callbacks = [best, steps, saving(5, tmp_path / "mine")]
        train(tmp_path, callbacks, Scored([1.0, 2.0, 0.5]), max_epochs=epochs, ckpt_path="auto")
        assert checkpoint_names(tmp_path) == names
    assert verify(tmp_path / "mine") == []  # an explicit path is written although the step is saved


def test_a_clock_that_was_ahead_does_not_hold_a_run_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # J-03: the first checkpoint has the latest time
    clock = time.time
    monkeypatch.setattr("time.time", lambda: clock() + 3600)
    for epochs in (1, 2, 3, 4):
        module = Scored()
        train(tmp_path, Checkpoint(save_top_k=-1), module, max_epochs=epochs, ckpt_path="auto")
        assert module.started == [epochs - 1]
        monkeypatch.setattr("time.time", clock)
    saved = [
        load(tmp_path / CHECKPOINTS / f"epoch={epoch}-step={6 * epoch + 6}").manifest.metadata for epoch in range(4)
    ]
    assert [len(one.lineage) for one in saved] == [1, 2, 3, 4]
    assert [one.parent for one in saved[1:]] == [one.identifier for one in saved[:-1]]


def test_what_others_wrote_stays_and_new_names_do_not_collide(tmp_path: Path) -> None:  # F-07, F-15, F-16
    def identifiers() -> dict[str, str]:
        return {name: load(folder / name).manifest.identifier for name in folders(folder) if name[0] == "e"}

    folder = tmp_path / "checkpoints"
    (folder / "best").mkdir(parents=True)
    (folder / "tmp").mkdir()
    for epochs in (1, 2, 1):
        train(tmp_path, Checkpoint(folder), max_epochs=epochs)
    assert folders(folder) == ["best", "epoch=0-step=6", "epoch=0-step=6-v1", "epoch=1-step=12", "tmp"]
    before = identifiers()
    train(tmp_path, Checkpoint(folder, every_n_train_steps=2), ckpt_path=folder / "epoch=0-step=6", max_epochs=2)
    after = identifiers()
    assert after.items() >= before.items()
    assert sorted(set(after) - set(before)) == ["epoch=1-step=12-v1"]


def _writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-write")]


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


@pytest.mark.parametrize(("every", "step"), [(2, 3), (6, 6)])  # within a step, and at the end
def test_a_failure_in_the_background_surfaces(every: int, step: int, tmp_path: Path) -> None:  # F-08
    steps: list[int] = []

    class Blocked(Scored):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                (tmp_path / "file").write_text("")  # in place of the folder, which was checked before

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            steps.append(self.global_step)
            for thread in _writers():
                thread.join()

    checkpoint = Checkpoint(tmp_path / "file", every_n_train_steps=every, save_async=True)
    with pytest.raises(CheckpointError, match="could not be written"):
        train(tmp_path, checkpoint, Blocked())
    assert steps[-1] == step


def test_names_are_filled_with_values_and_a_folder_without_a_valid_one_is_refused(tmp_path: Path) -> None:
    values, module = {"epoch": 3, "val/loss": 0.256}, Scored()
    named = Checkpoint(filename="{epoch:03d}-{val/loss:.2f}")
    assert named.format_checkpoint_name(values) == "epoch=003-val_loss=0.26"
    assert named.format_checkpoint_name(values, filename="{epoch}", ver=3) == "epoch=3-v3"
    with pytest.raises(ConfigurationError, match=r"no value 'val_los' was logged.*val/loss"):
        named.format_checkpoint_name(values, "{val_los}")
    for dirpath in ("d" * 300, "é" * 200, "a\0b"):
        with pytest.raises(ConfigurationError, match="cannot write to"):
            train(tmp_path, Checkpoint(f"{tmp_path}/missing/{dirpath}"), module)
    assert module.started == []  # before the first step


class Whole(Validated):
    def on_train_epoch_end(self) -> None:
        self.log("whole", 2.0)


def fit(root: Path, callbacks: Any, scores: list[float], **options: Any) -> Fit:
    """Train ten steps an epoch, and log a score in each validation and another value after each epoch."""
    return train(root, callbacks, Whole(scores), loader(), loader(8), **options)


@pytest.mark.parametrize(
    ("options", "settings", "saved"),
    [
        pytest.param(AWAITED | ALL, {"num_sanity_val_steps": 1}, ["epoch=0-step=10", "epoch=1-step=20"], id="steps"),
        pytest.param(AWAITED | ALL | {"save_async": True}, {}, ["epoch=0-step=10", "epoch=1-step=20"], id="background"),
        pytest.param(TIMED, SECOND, ["epoch=1-step=20"], id="time"),
        pytest.param(EPOCHS, {"max_epochs": 4, **SECOND}, ["epoch=3-step=40"], id="an epoch without validation"),
        pytest.param(NAMED, {"max_epochs": 1}, ["epoch=0-val_loss=0.7"], id="a value in the name"),
        pytest.param({"monitor": "val_loss"}, {"max_epochs": -1, "max_steps": 3}, ["epoch=0-step=3"], id="the end"),
        pytest.param(AWAITED | {"monitor": "train_loss"}, {"max_epochs": 1}, ["epoch=0-step=8"], id="training"),
        pytest.param(WHOLE, {"max_epochs": 1}, ["whole=2.0"], id="a value that comes after the validation"),
    ],
)
def test_a_due_save_waits_for_the_validation(options: Any, settings: Any, saved: Any, tmp_path: Path) -> None:
    fit(tmp_path, Checkpoint(tmp_path / "here", **options), [0.7, 0.4, 0.3, 0.2], **{"max_epochs": 2, **settings})
    assert folders(tmp_path / "here") == saved


@pytest.mark.parametrize("score", [0.7, math.nan])
def test_the_newest_is_kept_without_a_score_until_then(score: float, tmp_path: Path) -> None:
    # keep_last and save_last do not depend on the monitored value, so a killed run loses no more than before
    newest = Checkpoint(tmp_path / "here", "{step}-{val_loss:.1f}", save_last=True, **AWAITED)
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, [newest, failing(9)], [score], max_epochs=2)
    assert folders(tmp_path / "here") == ["step=8-val_loss=nan"]
    assert newest.best_model_score is None
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, [newest, failing(17)], [score], ckpt_path=newest.last_model_path, max_epochs=2)
    assert newest.best_model_score == pytest.approx(score, nan_ok=True)
    assert folders(tmp_path / "here") == [f"step=10-val_loss={score}", "step=16-val_loss=nan"]


def test_without_its_validation_the_last_state_is_saved_without_a_score(tmp_path: Path, caplog: Any) -> None:
    checkpoint = Checkpoint(tmp_path / "here", **AWAITED)
    fit(tmp_path, checkpoint, [], max_epochs=2, check_val_every_n_epoch=5)
    assert folders(tmp_path / "here") == ["epoch=1-step=20"]
    assert checkpoint.best_model_score is None
    assert verify(checkpoint.best_model_path) == []
    (waits,) = [message for message in caplog.messages if "waits" in message]
    assert "monitor='val_loss'" in waits
    assert "step 4" in waits
    assert caplog.text.count("without a score") == 1


def test_a_value_that_will_not_come_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"monitor='val_los'.*\n?.*Did you mean 'val_loss'"):
        fit(tmp_path, Checkpoint(monitor="val_los", every_n_train_steps=4), [0.7])
    with pytest.raises(ConfigurationError, match="monitor='val_loss'"):
        fit(tmp_path, Checkpoint(**AWAITED), [0.7], limit_val_batches=0)
    with pytest.raises(ConfigurationError, match="monitor='val_loss'"):
        train(tmp_path, Checkpoint(**AWAITED), Whole([0.7]), loader())


def test_a_resumed_run_saves_at_the_validation_that_the_earlier_run_waited_for(tmp_path: Path) -> None:
    seven = {**AWAITED, "dirpath": tmp_path / "here", "every_n_train_steps": 7}
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, [Checkpoint(**seven), saving(8, tmp_path / "aside"), failing(9)], [])
    fit(tmp_path, Checkpoint(**seven), [0.7], ckpt_path=tmp_path / "aside")
    assert folders(tmp_path / "here") == ["epoch=0-step=10"]


def test_two_callbacks_in_one_folder_get_different_names(tmp_path: Path) -> None:
    folder = "memory://two-callbacks"
    best, steps = Checkpoint(folder, monitor="val_loss"), Checkpoint(folder, every_n_train_steps=10)
    fit(tmp_path, [best, steps], [0.7])
    paths = {best.best_model_path, steps.best_model_path}
    assert paths == {f"{folder}/epoch=0-step=10", f"{folder}/epoch=0-step=10-v1"}
    assert load(best.best_model_path).progress["epoch"] == 1
    assert load(steps.best_model_path).progress["batch_idx"] == 10


def fail(root: Path, *callbacks: Callback, **options: Any) -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        train(root, list(callbacks), **options)


def saver(**options: Any) -> Checkpoint:
    return Checkpoint(save_on_exception=True, **options)


@pytest.mark.parametrize("ckpt_path", ["auto", "last", f"{CHECKPOINTS}/exception-step=3"])
def test_a_failures_checkpoint_goes_once_a_resumed_run_has_a_later_one(ckpt_path: str, tmp_path: Path) -> None:
    steps = {"every_n_train_steps": 5, "save_async": ckpt_path == "last"}
    fail(tmp_path, saver(**steps), failing(3))
    assert checkpoint_names(tmp_path) == ["exception-step=3"]
    assert (tmp_path / CHECKPOINTS / "latest").read_text() == "exception-step=3"
    fail(tmp_path, saver(**steps), failing(4), ckpt_path=tmp_path / ckpt_path if "/" in ckpt_path else ckpt_path)
    assert checkpoint_names(tmp_path) == ["exception-step=4"]
    train(tmp_path, saver(**steps), ckpt_path="auto")
    assert checkpoint_names(tmp_path) == ["epoch=0-step=5"]
    assert verify(tmp_path / CHECKPOINTS / "epoch=0-step=5") == []


def test_a_failures_checkpoint_stays_if_no_resumable_one_follows(tmp_path: Path) -> None:
    fail(tmp_path, saver(save_weights_only=True), failing(3))
    train(tmp_path, saver(save_weights_only=True), ckpt_path="auto")
    assert checkpoint_names(tmp_path) == ["epoch=0-step=6", "exception-step=3"]


@pytest.mark.parametrize(
    ("ckpt_path", "names"),
    [
        pytest.param(None, ["exception-step=3", "exception-step=3-v1"], id="of another run"),
        pytest.param("auto", ["exception-step=3"], id="of a resumed run, before its first step"),
    ],
)
def test_a_second_failure_at_a_step_replaces_no_checkpoint(ckpt_path: Any, names: Any, tmp_path: Path) -> None:
    fail(tmp_path, saver(dirpath=tmp_path / "both"), failing(3))
    first = load(tmp_path / "both/exception-step=3").manifest.identifier
    fail(tmp_path, saver(dirpath=tmp_path / "both"), failing(3), ckpt_path=ckpt_path)
    assert folders(tmp_path / "both") == names
    assert load(tmp_path / "both/exception-step=3").manifest.identifier == first


@pytest.mark.parametrize(
    ("savers", "at", "window", "written"),
    [
        pytest.param([FOUR], 4, 1, ["epoch=0-step=4"], id="in a saved step"),
        pytest.param([FOUR | {"save_async": True}], 4, 1, ["epoch=0-step=4"], id="in background"),
        pytest.param([{"every_n_train_steps": 2}], 5, 2, ["epoch=0-step=2"], id="in the window after a saved step"),
        pytest.param([{}], 5, 2, ["exception-step=2"], id="in the window after another step"),
        pytest.param([WEIGHTS], 4, 1, ["epoch=0-step=4", "exception-step=4"], id="weights alone are no state"),
        pytest.param([{}, {"monitor": "train_loss"}], 3, 1, ["exception-step=3"], id="two callbacks"),
        pytest.param([{}, {"every_n_train_steps": 3}], 3, 1, ["epoch=0-step=3"], id="another's"),
        pytest.param(GONE, 4, 1, ["exception-step=4"], id="a saved step whose checkpoint is gone"),
    ],
)
def test_a_failure_writes_no_state_twice(savers: Any, at: int, window: int, written: Any, tmp_path: Path) -> None:
    #
    def remove(trainer: Any, *arguments: Any) -> None:
        if trainer.micro_batches == 4 and savers is GONE:
            shutil.rmtree(tmp_path / CHECKPOINTS / "epoch=0-step=4")

    others = [*(saver(**options) for options in savers), LambdaCallback(on_train_batch_start=remove)]
    fail(tmp_path, *others, failing(at), accumulate_grad_batches=window)
    assert checkpoint_names(tmp_path) == written
    assert verify(tmp_path / CHECKPOINTS / written[0]) == []
    assert load(tmp_path / CHECKPOINTS / written[0]).progress["samples_seen"] == at - at % window


@pytest.mark.parametrize("others", [[], [{"monitor": "train_loss"}]], ids=["alone", "beside another"])
def test_a_preemption_after_a_saved_step_writes_nothing(others: list[dict[str, Any]], tmp_path: Path) -> None:
    def terminate(trainer: Any, *arguments: Any) -> None:
        if trainer.global_step in (3, 4):  # in the saved step, and before the first step of the resumed run
            os.kill(os.getpid(), signal.SIGTERM)

    callbacks: list[Callback] = [*(saver(**options) for options in others), saver(every_n_train_steps=4)]
    callbacks.append(LambdaCallback(on_train_batch_start=terminate))
    with pytest.raises(SystemExit):
        train(tmp_path, callbacks)
    assert checkpoint_names(tmp_path) == ["epoch=0-step=4"]
    with pytest.raises(SystemExit):
        train(tmp_path, callbacks, ckpt_path="auto", max_steps=20)
    assert "interrupted-step=4" not in checkpoint_names(tmp_path)


@pytest.mark.parametrize("key", ["kept", "to_remove", "interrupt_checkpoint"])
@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(lambda folder: {"name": f"../{folder.name}", "identifier": "a" * 32}, id="outside"),
        pytest.param(lambda folder: {"name": "..", "identifier": "a" * 32}, id="the folder above"),
        pytest.param(lambda folder: {"name": "linked", "identifier": "a" * 32}, id="a link"),
        pytest.param(lambda folder: {"path": str(folder), "score": None, "number": 0, "step": 0}, id="an older path"),
        pytest.param(str, id="a path"),
    ],
)
def test_an_edited_list_removes_nothing(key: str, planted: Any, tmp_path: Path) -> None:  # J-01
    unrelated = tmp_path / "unrelated"
    unrelated.mkdir()
    (unrelated / "thesis.txt").write_text("years of work")

    class Edited(Checkpoint):
        def state_dict(self) -> dict[str, Any]:
            state, entry = super().state_dict(), planted(unrelated)
            return {**state, key: entry if key == "interrupt_checkpoint" else [entry, *state[key]]}

    train(tmp_path, Edited())
    (tmp_path / CHECKPOINTS / "linked").symlink_to(unrelated)
    train(tmp_path, Edited(), max_epochs=2, ckpt_path=tmp_path / CHECKPOINTS / "epoch=0-step=6")
    assert (unrelated / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / CHECKPOINTS / "linked").is_symlink()
    assert "epoch=1-step=12" in checkpoint_names(tmp_path)


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(lambda url: {"name": "..", "identifier": "a" * 32}, id="the folder above"),
        pytest.param(lambda url: {"name": "others", "identifier": "a" * 32}, id="another run's"),
        pytest.param(lambda url: {"path": f"{url}/others"}, id="an older path"),
    ],
)
def test_an_edited_list_removes_nothing_at_a_url(planted: Any, tmp_path: Path) -> None:  # J-01
    bucket, url = fsspec.filesystem("memory"), f"memory://{tmp_path.name}/run"

    class Edited(Checkpoint):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "to_remove": [planted(url)]}

    bucket.pipe_file(f"/{tmp_path.name}/thesis.txt", b"years of work")
    train(tmp_path, Checkpoint(url, "others"))
    before = set(bucket.find(f"/{tmp_path.name}"))
    train(tmp_path, Edited(url))
    train(tmp_path, Edited(url), max_epochs=2, ckpt_path=f"{url}/epoch=0-step=6")
    assert before <= set(bucket.find(f"/{tmp_path.name}"))
    assert load(f"{url}/epoch=1-step=12").progress["epoch"] == 2


def test_other_files_in_a_checkpoint_stay(tmp_path: Path) -> None:  # J-01
    bucket = fsspec.filesystem("memory")
    train(tmp_path, Checkpoint("memory://other/run"))
    bucket.pipe_file("/other/run/epoch=0-step=6/notes.txt", b"mine")
    train(tmp_path, Checkpoint("memory://other/run"), max_epochs=2, ckpt_path="last")
    assert bucket.find("/other/run/epoch=0-step=6") == ["/other/run/epoch=0-step=6/notes.txt"]
    assert load("memory://other/run/epoch=1-step=12").progress["epoch"] == 2

    first = tmp_path / "folder/epoch=0-step=6"
    train(tmp_path, Checkpoint(tmp_path / "folder"))
    (first / "manifest.json.sig").write_text("mine")
    (first / "notes").mkdir()
    train(tmp_path, Checkpoint(tmp_path / "folder"), max_epochs=2, ckpt_path=first)
    assert sorted(one.name for one in first.iterdir()) == ["manifest.json.sig", "notes"]


def test_a_run_that_resumes_a_neighbours_checkpoint_keeps_its_own(tmp_path: Path, monkeypatch: Any) -> None:  # J-01
    newest: dict[str, Any] = {"dirpath": "run", "save_top_k": 0, "keep_last": 2}
    for experiment in ("A", "B"):
        (tmp_path / experiment).mkdir()
        monkeypatch.chdir(tmp_path / experiment)
        train(Path(), Checkpoint(**newest), max_epochs=2)
    before = folders(tmp_path / "B/run")
    train(Path(), Checkpoint(**newest), max_epochs=4, ckpt_path="../A/run/epoch=1-step=12")
    after = folders(tmp_path / "B/run")
    assert set(before) <= set(after)
    assert len(after) == 4
    assert len(folders(tmp_path / "A/run")) == 2


@pytest.mark.parametrize(
    ("filename", "options", "scores"),
    [
        ("model", {"save_last": True}, [0.1, 0.8]),
        ("model", {"save_top_k": 2}, [0.1, 0.5]),
        ("model", {"save_top_k": -1}, [0.1, 0.5, 0.8, 0.9]),
        ("{score:.0f}", {"save_top_k": 2, "auto_insert_metric_name": False}, [0.1, 0.5]),
    ],
)
def test_each_kept_checkpoint_has_its_own_name(filename: str, options: Any, scores: Any, tmp_path: Path) -> None:
    # J-02
    checkpoint = Checkpoint(filename=filename, monitor="score", **options)
    train(tmp_path, checkpoint, Scored([0.5, 0.1, 0.9, 0.8]), max_epochs=4)
    kept = {Path(path).name: float(score) for path, score in checkpoint.best_k_models.items()}  # type: ignore[arg-type]
    assert sorted(kept.values()) == pytest.approx(scores)
    assert checkpoint_names(tmp_path) == sorted(kept)
    assert checkpoint.best_model_score == pytest.approx(0.1)
    assert load(checkpoint.best_model_path).progress["epoch"] == 2  # it holds the state that was saved then


def test_a_removal_or_a_latest_that_fails_ends_no_run(  # J-08
    tmp_path: Path, caplog: pytest.LogCaptureFixture, store: FaultyStore
) -> None:
    store.fail("remove", "run/epoch*", error=PermissionError("AccessDenied"), times=2)
    train(tmp_path, Checkpoint(f"{store.url}/run"), max_epochs=4)
    assert len(re.findall("Cannot remove .*; the run will try again: AccessDenied", caplog.text)) == 2
    assert {path.split("/")[1] for path in store.objects()} == {"epoch=3-step=24", "latest"}
    store.fail("put", "*/latest", error=OSError("SlowDown"), times=None)
    train(tmp_path, Checkpoint(f"{store.url}/other"), max_epochs=2)
    warning = f"Cannot write latest in '{store.url}/other' (SlowDown). The checkpoint 'epoch=1-step=12' is complete."
    assert warning in caplog.text
    assert load(f"{store.url}/other/epoch=1-step=12").progress["epoch"] == 2
