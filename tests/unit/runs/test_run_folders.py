"""Every fit has its own folder; the contents of the folder: J-13."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
from run_case import Net, data, fit, folders, left_running, record, rows, trained

from drivetrain import Fit, Logger
from drivetrain.callbacks import Checkpoint, LambdaCallback
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger, TensorBoardLogger


def test_each_fit_has_all_its_files_in_a_folder_of_its_own(tmp_path: Path) -> None:  # J-13
    trainer: Any = fit(tmp_path)
    runs: dict[Path, str] = {}
    for number in range(3):
        trainer.fit(Net(), data())
        folder = tmp_path / "drivetrain_logs" / f"version_{number}"
        runs[folder] = trainer.run_id
        assert trainer.log_dir == str(folder) == trainer.logger.log_dir
        assert Path(trainer.checkpoint_callback.best_model_path).parent == folder / "checkpoints"
    assert len(set(runs.values())) == 3
    for folder, run in runs.items():
        files = sorted(one.name for one in folder.iterdir())
        assert files == ["checkpoints", "hparams.json", "metrics.csv", "run.json"]
        assert record(folder)["id"] == run
        assert [row["step"] for row in rows(folder)] == ["1", "2", "3", "4", "5", "6"]
        assert len(list((folder / "checkpoints").glob("epoch=*"))) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["drivetrain_logs"]


def test_loggers_with_one_root_and_name_share_a_folder(tmp_path: Path) -> None:  # J-13
    def loggers() -> list[Logger]:
        beside = CSVLogger(tmp_path / "beside", name="b"), TensorBoardLogger(tmp_path / "beside", name="b")
        return [TensorBoardLogger(tmp_path, name="a"), CSVLogger(tmp_path, name="a"), *beside]

    CSVLogger(tmp_path / "beside", name="b").log_hyperparams({"from": "before"})
    ours = loggers()
    trainer = trained(tmp_path, logger=ours)
    assert trainer.log_dir == str(tmp_path / "a" / "version_0")
    assert [one.version for one in ours] == [0, 0, 1, 1]
    for folder in (tmp_path / "a" / "version_0", tmp_path / "beside" / "b" / "version_1"):
        assert {"metrics.csv"} | {one.name for one in folder.glob("events.*")} <= {one.name for one in folder.iterdir()}
        assert len(list(folder.glob("events.*"))) >= 1
    assert folders(tmp_path / "beside", "b") == ["version_0", "version_1"]
    # A resumed run continues in its folder.
    again = loggers()
    trained(tmp_path, "auto", logger=again, max_epochs=2)
    assert [one.version for one in again] == [0, 0, 1, 1]


def test_a_loggers_own_version_is_the_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # J-13
    first = trained(tmp_path, logger=[CSVLogger(tmp_path), TensorBoardLogger(tmp_path, version="mine")])
    assert first.log_dir == str(tmp_path / "drivetrain_logs" / "mine")
    assert folders(tmp_path) == ["mine"]
    # The earlier run's record and checkpoints are kept.
    second = trained(tmp_path, logger=CSVLogger(tmp_path, version="mine"))
    assert "has an earlier run's files; its record is kept as run-1.json" in caplog.text
    assert second.run_id != first.run_id
    folder = tmp_path / "drivetrain_logs" / "mine"
    assert {"run.json", "run-1.json"} <= {one.name for one in folder.iterdir()}
    saved = sorted(one.name for one in (folder / "checkpoints").glob("epoch=*"))
    assert saved == ["epoch=0-step=6", "epoch=0-step=6-v1"]
    # The folder of a running run is refused.
    left_running(second.log_dir)
    with pytest.raises(ConfigurationError, match=r"belongs to a run that is under way \(process 1 on "):
        fit(tmp_path, logger=CSVLogger(tmp_path, version="mine")).fit(Net(), data())


def test_an_announced_version_is_kept(tmp_path: Path) -> None:  # J-13
    logger = CSVLogger(tmp_path)
    announced = Path(logger.log_dir)
    announced.mkdir(parents=True)
    (announced / "config.yaml").write_text("theirs")  # the user puts a file there before the run
    assert trained(tmp_path, logger=logger).log_dir == str(announced)
    # Another run claimed it first.
    late = CSVLogger(tmp_path)
    assert late.version == 1
    trained(tmp_path)
    assert trained(tmp_path, logger=late).log_dir == str(tmp_path / "drivetrain_logs" / "version_2")


def test_without_a_logger_the_folder_is_for_checkpoints_only(tmp_path: Path) -> None:  # J-13
    added = LambdaCallback(setup=lambda trainer, module, stage: trainer.callbacks.append(Checkpoint()))
    trainer = trained(tmp_path, logger=False, enable_checkpointing=False, callbacks=added)
    assert trainer.log_dir == str(tmp_path / "drivetrain_logs" / "version_0")
    assert sorted(one.name for one in Path(trainer.log_dir).iterdir()) == ["checkpoints", "run.json"]
    default = Fit(default_root_dir=tmp_path, max_epochs=1, logger=False, accelerator="cpu", enable_progress_bar=False)
    default.fit(Net(), data())
    assert default.log_dir == str(tmp_path / "drivetrain_logs" / "version_1")


def test_trial_runs_and_runs_without_loggers_and_checkpoints_write_nothing(tmp_path: Path) -> None:  # J-13
    barebones = {"barebones": True, "log_every_n_steps": 0, "callbacks": None, "logger": None}
    nothing = {"logger": False, "callbacks": None, "enable_checkpointing": False}
    for options in ({"fast_dev_run": True}, barebones, nothing):
        trainer = trained(tmp_path, **options)
        assert (trainer.log_dir, trainer.run_id) == (None, "")
        assert list(tmp_path.iterdir()) == []


def test_an_evaluation_has_a_folder_only_with_a_file_logger(tmp_path: Path) -> None:  # J-13
    class Silent(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch[0]

    fit(tmp_path).test(Silent(), data())
    fit(tmp_path).predict(Silent(), data())
    assert list(tmp_path.iterdir()) == []
    fit(tmp_path, logger=[CSVLogger(tmp_path), TensorBoardLogger(tmp_path)]).test(Net(), data(), verbose=False)
    assert folders(tmp_path) == ["version_0"]
    written = record(tmp_path / "drivetrain_logs" / "version_0")
    assert (written["stage"], written["status"]) == ("test", "finished")
    # "auto" never means it, nor do "last" and "best".
    assert trained(tmp_path, "auto", limit_train_batches=1).log_dir == str(tmp_path / "drivetrain_logs" / "version_1")


def test_an_evaluation_logs_to_the_folder_of_the_fit(tmp_path: Path) -> None:
    trainer = fit(tmp_path)
    trainer.validate(Net(), data(), verbose=False)
    trainer.fit(Net(), data())
    trainer.test(Net(), data(), verbose=False)
    assert folders(tmp_path) == ["version_0"]
    assert {"val", "loss_step", "test"} <= rows(trainer.log_dir)[0].keys()
    written = record(trainer.log_dir)
    assert (written["stage"], written["status"], written["why"]) == ("fit", "finished", "max_epochs=1 is reached")
    assert [event["kind"] for event in written["events"]] == ["began", "evaluated"]
    trainer.fit(Net(), data())
    assert folders(tmp_path) == ["version_0", "version_1"]


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    class Refused(Net):
        def configure_optimizers(self) -> Any:
            return "no optimizer"

    for logger in (CSVLogger(tmp_path / "new" / "root"), CSVLogger(tmp_path / "chosen", "name", version="mine")):
        with pytest.raises(ConfigurationError):
            fit(tmp_path / "new" / "root", logger=logger).fit(Refused(), data())
    assert folders(tmp_path / "new" / "root") == []
    assert list((tmp_path / "chosen" / "name").glob("mine*")) == []


def test_a_folder_at_a_url_has_a_unique_name() -> None:  # J-13
    root = "memory://run-folders"
    places = [str(trained(root).log_dir) for _ in range(2)]
    assert len(set(places)) == 2
    bucket = fsspec.filesystem("memory")
    for place in places:
        assert place.startswith(f"{root}/drivetrain_logs/")
        found = {one["name"].rpartition("/")[2] for one in bucket.ls(place.removeprefix("memory:/"))}
        assert {"run.json", "metrics.csv", "checkpoints"} <= found
    assert trained(root, "auto", max_epochs=2).log_dir == places[-1]
    assert len(bucket.ls("/run-folders/drivetrain_logs")) == 2


class Minimal(Logger):
    """A third-party logger."""

    name = "minimal"
    version = "its own"

    def __init__(self, root: Path | None = None) -> None:
        self._root = root

    @property
    def save_dir(self) -> str | None:
        return None if self._root is None else str(self._root)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...


def test_the_first_logger_with_files_names_the_folder(tmp_path: Path) -> None:  # J-13
    none = trained(tmp_path / "a", logger=[Minimal(), CSVLogger(tmp_path / "a", name="second")])
    assert none.log_dir == str(tmp_path / "a" / "second" / "version_0")
    own = trained(tmp_path / "b", logger=[Minimal(tmp_path / "b"), CSVLogger(tmp_path / "b")])
    assert own.log_dir == str(tmp_path / "b" / "minimal" / "its own")
    assert record(own.log_dir)["name"] == "minimal"
    without_files = trained(tmp_path / "c", logger=Minimal())
    assert without_files.log_dir == str(tmp_path / "c" / "drivetrain_logs" / "version_0")

    class Adopting(Minimal):
        version = ""

        def adopt(self, version: str) -> None:
            self.version = version

    trainer = fit(tmp_path, logger=Adopting(tmp_path))
    for number in range(2):
        trainer.fit(Net(), data())
        assert trainer.log_dir == str(tmp_path / "minimal" / f"version_{number}")
        assert trainer.loggers[0].version == f"version_{number}"
