"""Runs whose working directory changes within the run, or has been removed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from engine_case import loader
from small_modules import Logs, calling

from drivetrain import Callback, ConfigurationError, Fit
from drivetrain.callbacks import Checkpoint, PredictionWriter
from drivetrain.data import read_predictions
from drivetrain.loggers import CSVLogger
from drivetrain.profilers import SimpleProfiler


def moving(hook: str, folder: Path) -> Callback:
    return calling(hook, lambda trainer: os.chdir(folder))


def fit(**options: Any) -> Fit:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1, "max_epochs": 1}
    return Fit(accelerator="cpu", seed=1, **{**quiet, **options})


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory at the start of the run; ``elsewhere`` is beside it."""
    for name in ("start", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "start")
    return tmp_path / "start"


def files(folder: Path) -> list[str]:
    return sorted(str(entry.relative_to(folder)) for entry in folder.rglob("*") if entry.is_file())


@pytest.mark.parametrize("hook", ["setup", "on_train_start", "on_train_batch_end"])
def test_all_files_are_where_the_run_began(hook: str, start: Path) -> None:
    elsewhere = start.parent / "elsewhere"
    trainer = fit(
        default_root_dir="root",
        logger=[CSVLogger("logs"), "csv"],
        profiler=SimpleProfiler("profile"),
        callbacks=[moving(hook, elsewhere), Checkpoint("saved", every_n_train_steps=2)],
    )
    trainer.fit(Logs(), loader(6, 1))
    assert {name.partition("/")[0] for name in files(start)} == {"logs", "saved", "profile", "root"}
    saved = trainer.checkpoint_callback.best_model_path
    assert Path(saved).parent == start / "saved"
    os.chdir(start)
    again = fit(logger=False, callbacks=moving("setup", elsewhere), max_epochs=2)
    again.fit(Logs(), loader(6, 1), ckpt_path=os.path.relpath(saved, start))
    assert again.global_step == 12
    os.chdir(start)
    callbacks = [moving("on_predict_start", elsewhere), PredictionWriter("predictions")]
    fit(logger=False, callbacks=callbacks).predict(Logs(), loader(6, 1), return_predictions=False)
    assert len(list(read_predictions(start / "predictions"))) == 6
    assert files(elsewhere) == []


def test_urls_and_paths_that_lack_a_slash_stay(start: Path) -> None:
    assert Checkpoint("memory://there").dirpath == "memory://there"
    assert Checkpoint("s3:/there").dirpath == "s3:/there"
    assert fit(default_root_dir="memory://there", logger=False).default_root_dir == "memory://there"


@pytest.fixture
def removed(start: Path) -> None:
    start.rmdir()


def test_without_a_working_directory_what_needs_no_relative_folder_works(removed: None, tmp_path: Path) -> None:
    trainer = fit(logger=False, enable_checkpointing=False)
    trainer.fit(Logs(), loader(6, 1))
    assert len(trainer.predict(Logs(), loader(6, 1)) or []) == trainer.global_step == 6
    fit(fast_dev_run=True).fit(Logs(), loader(6, 1))
    trainer = fit(default_root_dir=tmp_path / "root", logger="csv", callbacks=Checkpoint(tmp_path / "saved"))
    trainer.fit(Logs(), loader(6, 1))
    again = fit(default_root_dir=tmp_path / "root", logger="csv", max_epochs=2)
    again.fit(Logs(), loader(6, 1), ckpt_path=tmp_path / "saved/epoch=0-step=6")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logger": "csv", "enable_checkpointing": False},
        {"logger": False, "enable_checkpointing": False, "profiler": "simple"},
        {"logger": False, "callbacks": Checkpoint},
    ],
)
def test_without_a_working_directory_a_relative_folder_is_refused(removed: None, options: Any) -> None:
    trainer = fit(**{**options, **({"callbacks": Checkpoint("saved")} if "callbacks" in options else {})})
    with pytest.raises(ConfigurationError, match="the working directory was removed"):
        trainer.fit(Logs(), loader(6, 1))
    assert trainer.global_step == 0
