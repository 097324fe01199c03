"""Checkpoint: the state of a step is written once, and the checkpoint of a failure goes once a later one stands."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from callback_modules import Regression, loader, quiet_fit

from drivetrain import Callback, Fit
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load, verify

RUN = "drivetrain_logs/version_0/checkpoints"


class FailAt(Callback):
    """Raises an error after ``batch`` micro-batches."""

    def __init__(self, batch: int, remove: Path | None = None) -> None:
        self.batch = batch
        self.remove = remove

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.micro_batches == self.batch:
            if self.remove is not None:
                shutil.rmtree(self.remove)
            raise RuntimeError("out of luck")


class TerminateAt(Callback):
    """Sends SIGTERM to this process before the micro-batch after an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def run(root: Path, callbacks: list[Any], ckpt_path: str | None = None, **options: Any) -> Fit:
    trainer = quiet_fit(**{"default_root_dir": root, "callbacks": callbacks, "enable_checkpointing": True, **options})
    trainer.fit(Regression(), loader(), ckpt_path=ckpt_path)
    return trainer


def fail(root: Path, callbacks: list[Any], ckpt_path: str | None = None, **options: Any) -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        run(root, callbacks, ckpt_path, **options)


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir())


def saver(**options: Any) -> Checkpoint:
    return Checkpoint(save_on_exception=True, **options)


class TestCheckpointsOfFailures:
    @pytest.mark.parametrize("ckpt_path", ["auto", "last", f"{RUN}/exception-step=3"])
    @pytest.mark.parametrize("save_async", [False, True])
    def test_they_go_once_the_resumed_run_has_a_later_one(
        self, ckpt_path: str, save_async: bool, tmp_path: Path
    ) -> None:
        # exception-step=3 stayed for ever
        fail(tmp_path, [saver(every_n_train_steps=5, save_async=save_async), FailAt(3)])
        assert names(tmp_path / RUN) == ["exception-step=3"]
        assert (tmp_path / RUN / "latest").read_text() == "exception-step=3"
        path = str(tmp_path / ckpt_path) if "/" in ckpt_path else ckpt_path
        fail(tmp_path, [saver(every_n_train_steps=5, save_async=save_async), FailAt(4)], path)
        assert names(tmp_path / RUN) == ["exception-step=4"]
        run(tmp_path, [saver(every_n_train_steps=5, save_async=save_async)], "auto")
        assert names(tmp_path / RUN) == ["epoch=0-step=10"]
        assert verify(tmp_path / RUN / "epoch=0-step=10") == []

    def test_one_that_no_later_one_follows_stays(self, tmp_path: Path) -> None:
        #
        fail(tmp_path, [saver(save_weights_only=True), FailAt(3)])
        run(tmp_path, [saver(save_weights_only=True)], "auto")
        assert names(tmp_path / RUN) == ["epoch=0-step=10", "exception-step=3"]  # no run can resume from the first

    def test_one_of_another_run_is_neither_replaced_nor_removed(self, tmp_path: Path) -> None:
        # the second failure replaced the first run's checkpoint
        fail(tmp_path, [saver(dirpath=tmp_path / "both"), FailAt(3)])
        first = load(tmp_path / "both/exception-step=3").manifest.identifier
        fail(tmp_path, [saver(dirpath=tmp_path / "both"), FailAt(3)])
        assert names(tmp_path / "both") == ["exception-step=3", "exception-step=3-v1"]
        assert load(tmp_path / "both/exception-step=3").manifest.identifier == first

    def test_within_a_window_the_last_step_is_saved(self, tmp_path: Path) -> None:
        #
        fail(tmp_path, [saver(), FailAt(5)], accumulate_grad_batches=2)
        run(tmp_path, [saver()], "auto", accumulate_grad_batches=2)
        assert names(tmp_path / RUN) == ["epoch=0-step=5"]


class TestOneStateOneCheckpoint:
    @pytest.mark.parametrize("save_async", [False, True])
    def test_a_failure_in_a_step_that_is_saved_writes_nothing(self, save_async: bool, tmp_path: Path) -> None:
        # epoch=0-step=4 and exception-step=4 held the same state
        fail(tmp_path, [saver(every_n_train_steps=4, save_async=save_async), FailAt(4)])
        assert names(tmp_path / RUN) == ["epoch=0-step=4"]
        assert verify(tmp_path / RUN / "epoch=0-step=4") == []

    def test_a_failure_within_the_window_after_a_saved_step_writes_nothing(self, tmp_path: Path) -> None:
        #
        fail(tmp_path, [saver(every_n_train_steps=2), FailAt(5)], accumulate_grad_batches=2)
        assert names(tmp_path / RUN) == ["epoch=0-step=2"]

    def test_a_saved_step_whose_checkpoint_is_gone_is_written(self, tmp_path: Path) -> None:
        #
        fail(tmp_path, [saver(every_n_train_steps=4), FailAt(4, tmp_path / RUN / "epoch=0-step=4")])
        assert names(tmp_path / RUN) == ["exception-step=4"]

    def test_weights_alone_are_no_state(self, tmp_path: Path) -> None:
        #
        fail(tmp_path, [saver(every_n_train_steps=4, save_weights_only=True), FailAt(4)])
        assert names(tmp_path / RUN) == ["epoch=0-step=4", "exception-step=4"]

    def test_two_callbacks_write_one(self, tmp_path: Path) -> None:
        #
        fail(tmp_path, [saver(), saver(monitor="train_loss"), FailAt(3)])
        assert names(tmp_path / RUN) == ["exception-step=3"]
        fail(tmp_path / "other", [saver(), Checkpoint(every_n_train_steps=3), FailAt(3)])
        assert names(tmp_path / "other" / RUN) == ["epoch=0-step=3"]

    def test_a_run_that_fails_again_before_its_first_step_writes_nothing(self, tmp_path: Path) -> None:
        #
        fail(tmp_path, [saver(), FailAt(3)])
        identifier = load(tmp_path / RUN / "exception-step=3").manifest.identifier
        fail(tmp_path, [saver(), FailAt(3)], "auto")
        assert names(tmp_path / RUN) == ["exception-step=3"]
        assert load(tmp_path / RUN / "exception-step=3").manifest.identifier == identifier

    @pytest.mark.parametrize("first", ["own", "other's"])
    def test_a_preemption_after_a_saved_step_writes_nothing(self, first: str, tmp_path: Path) -> None:
        # interrupted-step=4 (of the first callback) beside epoch=0-step=4 (of the second), or exception-step=4
        callbacks = [saver(every_n_train_steps=4)]
        if first == "other's":
            callbacks.insert(0, saver(monitor="train_loss"))
        with pytest.raises(SystemExit):
            run(tmp_path, [*callbacks, TerminateAt(4)])
        assert names(tmp_path / RUN) == ["epoch=0-step=4"]
        with pytest.raises(SystemExit):  # at once, before the first step
            run(tmp_path, [*callbacks, TerminateAt(5)], "auto", max_steps=20)
        assert "interrupted-step=4" not in names(tmp_path / RUN)

    def test_an_explicit_path_is_written(self, tmp_path: Path) -> None:
        #
        class SaveAt(Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
                if trainer.global_step == 4:
                    trainer.save_checkpoint(str(tmp_path / "mine"))

        run(tmp_path, [Checkpoint(every_n_train_steps=4), SaveAt()], max_steps=4)
        assert verify(tmp_path / "mine") == []
        assert names(tmp_path / RUN) == ["epoch=0-step=4"]
