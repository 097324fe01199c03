"""Checkpoint: a state is written once, a failure's checkpoint goes once a later one stands, and no others go."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import fsspec
import pytest
from callback_modules import CHECKPOINTS, Scored, checkpoint_names, failing, folders, saving, train

from drivetrain import Callback
from drivetrain.callbacks import Checkpoint, LambdaCallback
from drivetrain.checkpoint import load, verify
from faulty_store import FaultyStore


def fail(root: Path, *callbacks: Callback, **options: Any) -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        train(root, list(callbacks), **options)


def saver(**options: Any) -> Checkpoint:
    return Checkpoint(save_on_exception=True, **options)


def terminating(step: int) -> LambdaCallback:
    """Return a callback that sends SIGTERM to this process before the micro-batch after an optimizer step."""

    def terminate(trainer: Any, *arguments: Any) -> None:
        if trainer.global_step == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return LambdaCallback(on_train_batch_start=terminate)


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


FOUR = {"every_n_train_steps": 4}
WEIGHTS = FOUR | {"save_weights_only": True}
GONE = [FOUR]


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
    callbacks = [*(saver(**options) for options in others), saver(every_n_train_steps=4)]
    with pytest.raises(SystemExit):
        train(tmp_path, [*callbacks, terminating(4)])
    assert checkpoint_names(tmp_path) == ["epoch=0-step=4"]
    with pytest.raises(SystemExit):  # at once, before the first step
        train(tmp_path, [*callbacks, terminating(5)], ckpt_path="auto", max_steps=20)
    assert "interrupted-step=4" not in checkpoint_names(tmp_path)


def test_an_explicit_path_is_written_although_the_step_is_saved(tmp_path: Path) -> None:
    train(tmp_path, [Checkpoint(every_n_train_steps=4), saving(4, tmp_path / "mine")], max_steps=4)
    assert verify(tmp_path / "mine") == []
    assert checkpoint_names(tmp_path) == ["epoch=0-step=4"]


@pytest.mark.parametrize("key", ["kept", "going", "interim"])
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
            return {**state, key: entry if key == "interim" else [entry, *state[key]]}

    train(tmp_path, Edited())
    (tmp_path / CHECKPOINTS / "linked").symlink_to(unrelated)
    train(tmp_path, Edited(), max_epochs=2, ckpt_path=tmp_path / CHECKPOINTS / "epoch=0-step=6")
    assert (unrelated / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / CHECKPOINTS / "linked").is_symlink()
    assert "epoch=1-step=12" in checkpoint_names(tmp_path)


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


def test_a_removal_or_a_latest_that_fails_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # J-08
    store = FaultyStore(tmp_path / "store").mount()
    store.fail("remove", "run/epoch*", error=PermissionError("AccessDenied"), times=2)
    train(tmp_path, Checkpoint(f"{store.url}/run"), max_epochs=4)
    assert len(re.findall("Cannot remove .*; the run will try again: AccessDenied", caplog.text)) == 2
    assert {path.split("/")[1] for path in store.objects()} == {"epoch=3-step=24", "latest"}
    store.fail("put", "*/latest", error=OSError("SlowDown"), times=None)
    train(tmp_path, Checkpoint(f"{store.url}/other"), max_epochs=2)
    warning = f"Cannot write latest in '{store.url}/other' (SlowDown). The checkpoint 'epoch=1-step=12' is complete."
    assert warning in caplog.text
    assert load(f"{store.url}/other/epoch=1-step=12").progress["epoch"] == 2
