"""The closing message of a training run: why it ended, how long it took, and its files (L-09)."""

from __future__ import annotations

import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Bare, Tiny, fit, loader

from captured_warnings import captured_warnings
from drivetrain import Callback, ConfigurationError
from drivetrain._engine.run_summary import _relative_path
from drivetrain._loops.stopping import _duration
from drivetrain.callbacks import Checkpoint
from drivetrain.loggers import CSVLogger

LOUD: dict[str, Any] = {"enable_progress_bar": True, "enable_checkpointing": True}


class Worsens(Tiny):
    """Its second validation is the best."""

    values = (3.0, 1.0, 2.0)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.values[self.trainer.current_epoch])


def _said(path: Path, module: Any = None, raises: type[BaseException] | None = None, **options: Any) -> list[str]:
    """Return the closing lines of a fit, without the duration."""
    run = fit(path, **{**LOUD, "num_sanity_val_steps": 0, **options})
    with captured_warnings(logging.INFO) as lines:
        if raises is None:
            run.fit(module or Tiny(), loader(), loader())
        else:
            with pytest.raises(raises):
                run.fit(module or Tiny(), loader(), loader())
    ends = [line for line in lines if line.startswith("The run ended")]
    assert len(ends) <= 1
    return [re.sub(r" after [\d.]+ s\.", "", line) for end in ends for line in end.splitlines()]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_an_error_without_a_message_is_reported_by_its_type(tmp_path: Path) -> None:
    # L-09
    class Asserts(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise KeyboardInterrupt

    said = _said(tmp_path, Asserts(), KeyboardInterrupt)
    assert said[0] == "The run ended: KeyboardInterrupt (0 epochs, 0 optimizer steps)"


def test_an_unsaved_run_is_reported_once(tmp_path: Path) -> None:
    # L-09: the time limit is reached with the last batch of an epoch, which is saved before and after the validation
    run = fit(tmp_path, max_epochs=-1, max_time={"seconds": 0.001})
    with captured_warnings(logging.WARNING) as lines:
        run.fit(Tiny(), loader(), loader())
    assert sum("nothing is saved" in line for line in lines) == 1


def test_checkpoints_and_files_are_named_relative_to_the_working_directory(tmp_path: Path) -> None:
    # L-09
    keeps = Checkpoint(monitor="val_loss", keep_last=1)
    said = _said(tmp_path, Worsens(), max_epochs=3, callbacks=keeps, logger=CSVLogger(tmp_path / "runs", "one"))
    assert said == [
        "The run ended: max_epochs=3 is reached (3 epochs, 12 optimizer steps)",
        "  best checkpoint: runs/one/version_0/checkpoints/epoch=1-step=8 (val_loss 1)",
        "  last checkpoint: runs/one/version_0/checkpoints/epoch=2-step=12",
        "  files: runs/one/version_0 (checkpoints/, metrics.csv, run.json)",
    ]
    assert all(Path(re.sub(r" \(.*", "", line.partition(": ")[2])).is_dir() for line in said[1:])


def test_lines_about_best_and_last_checkpoints(tmp_path: Path) -> None:
    # L-09
    said = _said(tmp_path, Worsens(), max_epochs=2, callbacks=Checkpoint(monitor="val_loss"))
    assert [line.partition(":")[0] for line in said[1:]] == ["  best and last checkpoint", "  files"]
    said = _said(tmp_path)
    assert [line.partition(":")[0] for line in said[1:]] == ["  last checkpoint", "  files"]


def test_a_small_run_logs_one_line(tmp_path: Path) -> None:
    # L-09: the message stays short if a hundred fits wrote to the folder
    ended = "The run ended: max_epochs=1 is reached (1 epoch, 4 optimizer steps)"
    assert _said(tmp_path, enable_checkpointing=False) == [ended]
    assert _said(tmp_path, enable_progress_bar=False, logger=CSVLogger(tmp_path, "quiet")) == [ended]
    with captured_warnings(logging.INFO) as lines:
        fit(tmp_path, **LOUD).validate(Tiny(), loader(), verbose=False)
    assert not any("ended" in line for line in lines)


def test_a_preempted_run_names_its_checkpoint(tmp_path: Path) -> None:
    # L-09
    class Told(Worsens):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    said = _said(tmp_path, Told(), raises=SystemExit, max_epochs=3, callbacks=Checkpoint(monitor="val_loss"))
    folder = "drivetrain_logs/version_0"
    assert said == [
        "The run ended: SIGTERM asked it to save and leave (1 epoch, 7 optimizer steps)",
        f"  best checkpoint: {folder}/checkpoints/epoch=0-step=4 (val_loss 3)",
        f"  last checkpoint: {folder}/checkpoints/interrupted-step=7",
        f"  files: {folder} (checkpoints/, run.json)",
    ]


def test_a_failure_names_the_checkpoint_to_resume_from(tmp_path: Path) -> None:
    # L-09
    class Fails(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 6:
                raise ValueError("out of luck\nand more of it")
            return super().training_step(batch, batch_idx)

    said = _said(tmp_path, Fails(), raises=ValueError, max_epochs=3)
    assert said[0] == "The run ended: ValueError: out of luck (1 epoch, 6 optimizer steps)"
    assert said[1] == "  last checkpoint: drivetrain_logs/version_0/checkpoints/epoch=0-step=4"
    said = _said(tmp_path, Fails(), raises=ValueError, max_epochs=3, callbacks=Checkpoint(save_on_exception=True))
    assert said[1].endswith("checkpoints/exception-step=6")


def test_a_run_that_never_started_has_no_closing_message(tmp_path: Path) -> None:
    class Refuses(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            raise ConfigurationError("no")

    assert _said(tmp_path, Bare(), raises=ConfigurationError, callbacks=Refuses()) == []


def test_a_removed_checkpoint_is_not_named(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint("saved")

        def on_train_end(self, trainer: Any, module: Any) -> None:
            for file in Path("saved").iterdir():
                file.unlink()
            Path("saved").rmdir()

    assert len(_said(tmp_path, callbacks=Saves(), enable_checkpointing=False)) == 1


def test_formats_of_paths_and_durations(tmp_path: Path) -> None:
    assert _relative_path(str(tmp_path / "a" / "b")) == os.path.join("a", "b")
    assert _relative_path(str(tmp_path.parent)) == str(tmp_path.parent)
    assert _relative_path("s3://bucket/a") == "s3://bucket/a"
    assert [_duration(seconds) for seconds in (0.04, 12.34, 59.99, 60, 754, 3600, 90061)] == [
        "0.0 s",
        "12.3 s",
        "60.0 s",
        "1:00 min",
        "12:34 min",
        "1:00:00 h",
        "25:01:01 h",
    ]


def test_values_of_an_unfinished_evaluation_are_those_logged_so_far(tmp_path: Path) -> None:
    # L-09
    seen: list[dict[str, float]] = []

    class Evaluates(Tiny):
        reads = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train_loss", 7.0, prog_bar=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("mean", torch.tensor(float(batch_idx)), prog_bar=True)
            self.log("largest", -float(batch_idx), prog_bar=True, reduce_fx="max")
            self.log("hidden", 1.0)
            if self.reads:
                seen.append({name: float(value) for name, value in self.trainer.evaluation_so_far.items()})

    results = []
    for reads in (True, False):
        module = Evaluates()
        module.reads = reads
        run = fit(tmp_path, max_epochs=2, num_sanity_val_steps=0)
        run.fit(module, loader(), loader())
        results.append({name: run.callback_metrics[name] for name in ("mean", "largest")})
    assert seen == 2 * [{"mean": index / 2, "largest": 0.0} for index in range(4)]
    assert results[0] == results[1]
