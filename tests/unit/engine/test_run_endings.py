"""The closing message of a training run: why it ended, how long it took, and its files (L-09)."""

from __future__ import annotations

import logging
import os
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Tiny, fit, loader
from small_modules import calling, tiny

from captured_warnings import captured_warnings
from drivetrain.callbacks import Checkpoint
from drivetrain.loggers import CSVLogger

LOUD: dict[str, Any] = {"enable_progress_bar": True, "enable_checkpointing": True}


class Worsens(Tiny):
    """Its second validation is the best."""

    values = (3.0, 1.0, 2.0)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.values[self.trainer.current_epoch])


def closing_lines(path: Path, module: Any = None, raises: Any = None, **options: Any) -> list[str]:
    """Return the closing lines of a fit, without the duration."""
    run = fit(path, **{**LOUD, "num_sanity_val_steps": 0, **options})
    with captured_warnings(logging.INFO) as lines, pytest.raises(raises) if raises else nullcontext():
        run.fit(module or Tiny(), loader(), loader())
    ends = [line for line in lines if line.startswith("The run ended")]
    assert len(ends) <= 1
    return [re.sub(r" after [\d.]+ s\.", "", line) for end in ends for line in end.splitlines()]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_an_unsaved_run_is_reported_once(tmp_path: Path) -> None:
    # L-09: the time limit is reached with the last batch of an epoch, which is saved before and after the validation
    run = fit(tmp_path, max_epochs=-1, max_time={"seconds": 0.001})
    with captured_warnings(logging.WARNING) as lines:
        run.fit(Tiny(), loader(), loader())
    assert sum("nothing is saved" in line for line in lines) == 1


def test_checkpoints_and_files_are_named_relative_to_the_working_directory(tmp_path: Path) -> None:
    # L-09
    options = {"max_epochs": 3, "logger": CSVLogger(tmp_path / "runs", "one")}
    lines = closing_lines(tmp_path, Worsens(), callbacks=Checkpoint(monitor="val_loss", keep_last=1), **options)
    assert lines == [
        "The run ended: max_epochs=3 is reached (3 epochs, 12 optimizer steps)",
        "  best checkpoint: runs/one/version_0/checkpoints/epoch=1-step=8 (val_loss 1)",
        "  last checkpoint: runs/one/version_0/checkpoints/epoch=2-step=12",
        "  files: runs/one/version_0 (checkpoints/, metrics.csv, run.json)",
    ]
    assert all(Path(re.sub(r" \(.*", "", line.partition(": ")[2])).is_dir() for line in lines[1:])


def test_a_small_run_logs_one_line(tmp_path: Path) -> None:
    # L-09: the message stays short if a hundred fits wrote to the folder
    ended = "The run ended: max_epochs=1 is reached (1 epoch, 4 optimizer steps)"
    assert closing_lines(tmp_path, enable_checkpointing=False) == [ended]
    assert closing_lines(tmp_path, enable_progress_bar=False, logger=CSVLogger(tmp_path, "quiet")) == [ended]
    assert [line.partition(":")[0] for line in closing_lines(tmp_path)[1:]] == ["  last checkpoint", "  files"]
    with captured_warnings(logging.INFO) as lines:
        fit(tmp_path, **LOUD).validate(Tiny(), loader(), verbose=False)
    assert not any("ended" in line for line in lines)


def leave(trainer: Any) -> None:
    if trainer.global_step == 7:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_preempted_run_names_its_checkpoint(tmp_path: Path) -> None:
    # L-09
    callbacks = [calling("on_train_batch_end", leave), Checkpoint(monitor="val_loss")]
    lines = closing_lines(tmp_path, Worsens(), SystemExit, max_epochs=3, callbacks=callbacks)
    folder = "drivetrain_logs/version_0"
    assert lines == [
        "The run ended: SIGTERM asked it to save and leave (1 epoch, 7 optimizer steps)",
        f"  best checkpoint: {folder}/checkpoints/epoch=0-step=4 (val_loss 3)",
        f"  last checkpoint: {folder}/checkpoints/interrupted-step=7",
        f"  files: {folder} (checkpoints/, run.json)",
    ]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ValueError("no luck\nand more of it"), "ValueError: no luck"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_a_failure_names_the_checkpoint_to_resume_from(tmp_path: Path, error: BaseException, why: str) -> None:
    # L-09
    def fail(trainer: Any) -> None:
        if trainer.global_step == 6:
            raise error

    failing = calling("on_train_batch_start", fail)
    lines = closing_lines(tmp_path, raises=type(error), max_epochs=3, callbacks=failing)
    assert lines[0] == f"The run ended: {why} (1 epoch, 6 optimizer steps)"
    assert lines[1] == "  last checkpoint: drivetrain_logs/version_0/checkpoints/epoch=0-step=4"
    saving = Checkpoint(save_on_exception=True)
    lines = closing_lines(tmp_path, raises=type(error), max_epochs=3, callbacks=[failing, saving])
    if isinstance(error, ValueError):
        assert lines[1].endswith("checkpoints/exception-step=6")


def test_values_of_an_unfinished_evaluation_are_those_logged_so_far(tmp_path: Path) -> None:
    # L-09
    seen: list[dict[str, float]] = []

    def evaluate(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("mean", torch.tensor(float(batch_idx)), prog_bar=True)
        self.log("largest", -float(batch_idx), prog_bar=True, reduce_fx="max")
        self.log("hidden", 1.0)

    def read(trainer: Any) -> None:
        seen.append({name: float(value) for name, value in trainer.evaluation_so_far.items()})

    results = []
    callbacks: Any
    for callbacks in (calling("on_validation_batch_end", read), []):
        run = fit(tmp_path, max_epochs=2, num_sanity_val_steps=0, callbacks=callbacks)
        run.fit(tiny(validation_step=evaluate), loader(), loader())
        results.append({name: run.callback_metrics[name] for name in ("mean", "largest")})
    assert seen == 2 * [{"mean": index / 2, "largest": 0.0} for index in range(4)]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.34, "12.3 s"), (60, "1:00 min"), (754, "12:34 min"), (90061, "25:01:01 h")]
)
def test_durations_of_any_length_are_readable(seconds: float, text: str) -> None:
    # Private: a test cannot wait for an hour.
    from drivetrain._loops.stopping import _duration

    assert _duration(seconds) == text
