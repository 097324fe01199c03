"""The engine uses callbacks and loggers through their interfaces only, so third-party classes work as well. K-02."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, fit, regression
from small_modules import calling
from test_logging import Kept

from drivetrain import Callback, ConfigurationError
from drivetrain.callbacks import Checkpoint, LossSpikeGuard, ProgressBar


class Saver(Callback):
    """A third-party callback that saves a checkpoint every few steps."""

    saves_resumable = True
    writes_to: Any = ()
    kept_checkpoints: Any = ()

    def __init__(self, folder: Path, every: int = 10**9, leaving: str = "defer_save") -> None:
        self.folder, self.every, self.leaving = folder, every, leaving
        self.writes_to, self.kept_checkpoints = [str(folder)], []
        self.rollbacks: list[str] = []

    def _write(self, trainer: Any) -> None:
        path = f"{self.folder}/mine-{trainer.global_step}"
        trainer.write_checkpoint(path, then=lambda: self.kept_checkpoints.append(path))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % self.every == 0:
            trainer.defer_save(lambda: self._write(trainer))

    def save_before_leaving(self, trainer: Any, module: Any) -> bool:
        if self.leaving == "defer_save":
            trainer.defer_save(lambda: self._write(trainer))
        elif self.leaving == "save_checkpoint":
            trainer.save_checkpoint(f"{self.folder}/mine-{trainer.global_step}")
        return self.leaving != "nothing"

    def before_rollback(self, trainer: Any, module: Any) -> None:
        self.rollbacks.append(f"before at {trainer.global_step}")

    def after_rollback(self, trainer: Any, module: Any, path: str) -> None:
        self.rollbacks.append(f"after at {trainer.global_step}: {os.path.basename(path)}")


def preempt(trainer: Any) -> None:
    if trainer.global_step == 3:
        signal.raise_signal(signal.SIGTERM)


PREEMPTED = calling("on_train_batch_end", preempt)


@pytest.mark.parametrize("leaving", ["defer_save", "save_checkpoint", "nothing"])
def test_a_third_party_callback_saves_before_a_preempted_run_exits(tmp_path: Path, caplog: Any, leaving: str) -> None:
    callbacks = [Saver(tmp_path / "own", leaving=leaving), PREEMPTED]
    with pytest.raises(SystemExit):
        fit(tmp_path, max_epochs=2, callbacks=callbacks).fit(Regression(), regression())
    assert ("nothing is saved" in caplog.text) == (leaving == "nothing")
    if leaving == "nothing":
        return
    assert os.listdir(tmp_path / "own") == ["mine-3"]
    # "auto" searches the folder that the callback declares.
    resumed, undisturbed = Regression(), Regression()
    trainer = fit(tmp_path, max_epochs=2, callbacks=Saver(tmp_path / "own"))
    trainer.fit(resumed, regression(), ckpt_path="auto")
    assert trainer.global_step == 12
    fit(tmp_path, max_epochs=2).fit(undisturbed, regression())
    assert torch.equal(resumed.layer.weight, undisturbed.layer.weight)


def test_every_callback_that_keeps_full_checkpoints_saves(tmp_path: Path) -> None:
    weights, whole = tmp_path / "weights", tmp_path / "whole"
    callbacks = [Checkpoint(weights, save_weights_only=True), Checkpoint(whole), Saver(tmp_path / "own"), PREEMPTED]
    with pytest.raises(SystemExit):
        fit(tmp_path, callbacks=callbacks).fit(Regression(), regression())
    assert not weights.exists()
    assert "interrupted-step=3" in os.listdir(whole)
    assert os.listdir(tmp_path / "own") == ["mine-3"]


def test_a_run_goes_back_to_a_checkpoint_of_a_third_party_callback(tmp_path: Path) -> None:
    saver = Saver(tmp_path / "own", every=2)

    def go_back(trainer: Any) -> None:
        if trainer.global_step == 5 and not saver.rollbacks:
            path, step = trainer.checkpoint_before(3)
            assert (os.path.basename(path), step) == ("mine-2", 2)
            trainer.roll_back(path)

    fit(tmp_path, callbacks=[saver, calling("on_train_batch_end", go_back)]).fit(Regression(), regression())
    assert saver.rollbacks == ["before at 5", "after at 2: mine-2"]
    # LossSpikeGuard uses the same interface and does not check for a class.
    fit(tmp_path, callbacks=[LossSpikeGuard("rollback"), Saver(tmp_path / "b")]).fit(Regression(), regression())


def test_folders_of_third_party_callbacks_and_loggers_are_probed_before_the_first_step(tmp_path: Path) -> None:
    class Rows(Kept):
        save_dir = str(tmp_path / "file" / "logs")

    (tmp_path / "file").write_text("")
    for options, name in (({"callbacks": Saver(tmp_path / "file" / "own")}, "Saver"), ({"logger": Rows()}, "Rows")):
        run = fit(tmp_path, **options)
        with pytest.raises(ConfigurationError, match=f"{name} cannot write to .*is not a folder"):
            run.fit(Regression(), regression())
        assert run.global_step == 0


def test_lines_are_printed_through_a_callback_that_offers_it(tmp_path: Path, capsys: Any) -> None:
    class Screen(Callback):
        lines: list[str]

        def write_line(self, text: str) -> bool:
            self.lines = [text]
            return True

    screen, stream = Screen(), io.StringIO()
    fit(tmp_path, callbacks=screen).print("loss", 3)
    assert screen.lines == ["loss 3"]
    fit(tmp_path, callbacks=ProgressBar(stream=stream)).print("loss", 4)
    assert stream.getvalue() == "loss 4\n"
    fit(tmp_path, callbacks=Saver(tmp_path)).print("loss", 5)
    assert capsys.readouterr().out == "loss 5\n"


def test_windows_and_monitors_of_a_third_party_callback_count(tmp_path: Path, caplog: Any) -> None:
    class Doubling(Callback):
        monitors: Any = {"valloss": "Doubling('valloss')"}  # noqa: RUF012

        def micro_batches_per_window(self, epoch: int) -> int:
            return 2**epoch

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.estimate = trainer.estimated_stepping_batches

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            module.log("val_loss", 1.0)

    doubling = Doubling()
    fit(tmp_path, max_epochs=3, callbacks=doubling).fit(Regression(), regression())
    assert doubling.estimate == 6 + 3 + 2
    named = "Doubling('valloss'): nothing of that name was logged in the first step. Did you mean 'val_loss'"
    assert named in caplog.text


def test_a_run_ended_by_a_third_party_callback_is_finished(tmp_path: Path) -> None:
    class Enough(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.should_stop = True

        def state_dict(self) -> dict[str, Any]:
            return {"enough": True}

        def reason_for_ending(self, state_dict: Mapping[str, Any]) -> str | None:
            return "it is enough" if state_dict["enough"] else None

    run = fit(tmp_path, max_epochs=5, callbacks=[Enough(), Saver(tmp_path / "own", every=1)])
    run.fit(Regression(), regression())
    path = f"{tmp_path}/own/mine-{run.global_step}"
    with pytest.raises(ConfigurationError, match="Enough has ended the run: it is enough"):
        fit(tmp_path, max_epochs=5, callbacks=Enough()).fit(Regression(), regression(), ckpt_path=path)
