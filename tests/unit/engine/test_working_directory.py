"""Runs whose working directory changes within the run, or has been removed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, ConfigurationError, Fit, TrainModule
from drivetrain.callbacks import Checkpoint, PredictionWriter
from drivetrain.data import read_predictions
from drivetrain.loggers import CSVLogger
from drivetrain.profilers import SimpleProfiler


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        output: torch.Tensor = self.layer(batch[0])
        return output

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Moving(Callback):
    """Changes the working directory in a hook."""

    def __init__(self, hook: str, folder: Path) -> None:
        setattr(self, hook, lambda *arguments, **options: os.chdir(folder))


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=1)


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


class TestOsChdirWithinARun:
    # the files of one run were in two places, or the run failed

    @pytest.mark.parametrize("hook", ["setup", "on_train_start", "on_train_batch_end"])
    def test_all_files_are_where_the_run_began(self, hook: str, start: Path) -> None:
        elsewhere = start.parent / "elsewhere"
        trainer = fit(
            default_root_dir="root",
            logger=CSVLogger("logs"),
            profiler=SimpleProfiler("profile"),
            callbacks=[Moving(hook, elsewhere), Checkpoint("saved", every_n_train_steps=2)],
        )
        trainer.fit(Net(), loader())
        assert files(elsewhere) == []
        assert {name.partition("/")[0] for name in files(start)} == {"logs", "saved", "profile"}
        assert Path(trainer.checkpoint_callback.best_model_path).parent == start / "saved"  # type: ignore[union-attr]

    def test_a_relative_default_root_dir(self, start: Path) -> None:
        elsewhere = start.parent / "elsewhere"
        fit(default_root_dir="root", logger="csv", callbacks=Moving("on_train_start", elsewhere)).fit(Net(), loader())
        assert files(elsewhere) == []
        assert {name.partition("/")[0] for name in files(start)} == {"root"}

    def test_a_relative_ckpt_path(self, start: Path) -> None:
        trainer = fit(default_root_dir="root", logger=False)
        trainer.fit(Net(), loader())
        path = os.path.relpath(trainer.checkpoint_callback.best_model_path, start)  # type: ignore[union-attr]
        again = fit(
            default_root_dir="root", logger=False, callbacks=Moving("setup", start.parent / "elsewhere"), max_epochs=2
        )
        again.fit(Net(), loader(), ckpt_path=path)
        assert again.global_step == 12

    def test_a_prediction_writer(self, start: Path) -> None:
        writer = PredictionWriter("predictions")
        moving = Moving("on_predict_start", start.parent / "elsewhere")
        fit(logger=False, callbacks=[moving, writer]).predict(Net(), loader(), return_predictions=False)
        assert files(start.parent / "elsewhere") == []
        assert len(list(read_predictions(start / "predictions"))) == 6

    def test_urls_and_paths_that_lack_a_slash_stay(self, start: Path) -> None:
        assert Checkpoint("memory://there").dirpath == "memory://there"
        assert Checkpoint("s3:/there").dirpath == "s3:/there"
        assert fit(default_root_dir="memory://there", logger=False).default_root_dir == "memory://there"


class TestAWorkingDirectoryThatWasRemoved:
    @pytest.fixture(autouse=True)
    def removed(self, start: Path) -> None:
        start.rmdir()

    def test_what_needs_no_folder_works(self) -> None:
        # Fit() raised FileNotFoundError
        trainer = fit(logger=False, enable_checkpointing=False)
        trainer.fit(Net(), loader())
        assert trainer.global_step == 6
        assert len(trainer.predict(Net(), loader()) or []) == 6
        fit(fast_dev_run=True).fit(Net(), loader())

    def test_absolute_folders_work(self, tmp_path: Path) -> None:
        trainer = fit(default_root_dir=tmp_path / "root", logger="csv", callbacks=Checkpoint(tmp_path / "saved"))
        trainer.fit(Net(), loader())
        assert (tmp_path / "saved/epoch=0-step=6").is_dir()
        again = fit(default_root_dir=tmp_path / "root", logger="csv", max_epochs=2)
        again.fit(Net(), loader(), ckpt_path=tmp_path / "saved/epoch=0-step=6")

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"logger": False},
            {"logger": "csv", "enable_checkpointing": False},
            {"logger": False, "enable_checkpointing": False, "profiler": "simple"},
            {"logger": False, "callbacks": "relative"},
        ],
    )
    def test_what_needs_a_folder_is_an_error_before_the_first_step(self, options: dict[str, Any]) -> None:
        if options.get("callbacks"):
            options = {**options, "callbacks": Checkpoint("saved")}
        trainer = fit(**options)
        with pytest.raises(ConfigurationError, match="the working directory was removed"):
            trainer.fit(Net(), loader())
        assert trainer.global_step == 0

    def test_a_relative_checkpoint_is_an_error_of_ours(self) -> None:
        trainer = fit(logger=False, enable_checkpointing=False)
        with pytest.raises(ConfigurationError, match="the working directory was removed"):
            trainer.fit(Net(), loader(), ckpt_path="saved/last")
