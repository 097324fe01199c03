"""Checkpoint: the state of a step is written once, and the checkpoint of a failure goes once a later one stands."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from callback_modules import CHECKPOINTS, checkpoint_names, failing, folders, saving, train

from drivetrain import Callback
from drivetrain.callbacks import Checkpoint, LambdaCallback
from drivetrain.checkpoint import load, verify


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


@pytest.mark.parametrize(
    ("ckpt_path", "save_async"), [("auto", False), ("last", True), (f"{CHECKPOINTS}/exception-step=3", False)]
)
def test_a_failures_checkpoint_goes_once_the_resumed_run_has_a_later_one(
    ckpt_path: str, save_async: bool, tmp_path: Path
) -> None:
    # exception-step=3 stayed for ever
    steps = {"every_n_train_steps": 5, "save_async": save_async}
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


def test_another_runs_checkpoint_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    # the second failure replaced the first run's checkpoint
    fail(tmp_path, saver(dirpath=tmp_path / "both"), failing(3))
    first = load(tmp_path / "both/exception-step=3").manifest.identifier
    fail(tmp_path, saver(dirpath=tmp_path / "both"), failing(3))
    assert folders(tmp_path / "both") == ["exception-step=3", "exception-step=3-v1"]
    assert load(tmp_path / "both/exception-step=3").manifest.identifier == first


def test_within_a_window_the_state_after_the_last_step_is_saved(tmp_path: Path) -> None:
    fail(tmp_path, saver(), failing(5), accumulate_grad_batches=2)
    assert checkpoint_names(tmp_path) == ["exception-step=2"]
    progress = load(tmp_path / CHECKPOINTS / "exception-step=2").progress
    assert (progress["batch_idx"], progress["samples_seen"]) == (4, 4)
    train(tmp_path, saver(), ckpt_path="auto", accumulate_grad_batches=2)
    assert checkpoint_names(tmp_path) == ["epoch=0-step=3"]


FOUR = {"every_n_train_steps": 4}


@pytest.mark.parametrize(
    ("savers", "at", "window", "written"),
    [
        pytest.param([FOUR], 4, 1, ["epoch=0-step=4"], id="in a saved step"),
        pytest.param([FOUR | {"save_async": True}], 4, 1, ["epoch=0-step=4"], id="in background"),
        pytest.param([{"every_n_train_steps": 2}], 5, 2, ["epoch=0-step=2"], id="in the window after a saved step"),
        pytest.param(
            [FOUR | {"save_weights_only": True}],
            4,
            1,
            ["epoch=0-step=4", "exception-step=4"],
            id="weights alone are no state",
        ),
        pytest.param([{}, {"monitor": "train_loss"}], 3, 1, ["exception-step=3"], id="two callbacks"),
        pytest.param([{}, {"every_n_train_steps": 3}], 3, 1, ["epoch=0-step=3"], id="another's"),
    ],
)
def test_a_failure_writes_no_state_twice(
    savers: list[dict[str, Any]], at: int, window: int, written: list[str], tmp_path: Path
) -> None:
    # epoch=0-step=4 and exception-step=4 held the same state
    fail(tmp_path, *(saver(**options) for options in savers), failing(at), accumulate_grad_batches=window)
    assert checkpoint_names(tmp_path) == written
    assert verify(tmp_path / CHECKPOINTS / written[0]) == []


def test_a_saved_step_whose_checkpoint_is_gone_is_written(tmp_path: Path) -> None:
    def remove(trainer: Any, *arguments: Any) -> None:
        if trainer.micro_batches == 4:
            shutil.rmtree(tmp_path / CHECKPOINTS / "epoch=0-step=4")

    fail(tmp_path, saver(every_n_train_steps=4), LambdaCallback(on_train_batch_start=remove), failing(4))
    assert checkpoint_names(tmp_path) == ["exception-step=4"]


def test_a_run_that_fails_again_before_its_first_step_writes_nothing(tmp_path: Path) -> None:
    fail(tmp_path, saver(), failing(3))
    identifier = load(tmp_path / CHECKPOINTS / "exception-step=3").manifest.identifier
    fail(tmp_path, saver(), failing(3), ckpt_path="auto")
    assert checkpoint_names(tmp_path) == ["exception-step=3"]
    assert load(tmp_path / CHECKPOINTS / "exception-step=3").manifest.identifier == identifier


@pytest.mark.parametrize("others", [[], [{"monitor": "train_loss"}]], ids=["alone", "beside another"])
def test_a_preemption_after_a_saved_step_writes_nothing(others: list[dict[str, Any]], tmp_path: Path) -> None:
    # interrupted-step=4 (of the first callback) beside epoch=0-step=4 (of the second), or exception-step=4
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
