"""Every fit has a folder of its own, and runs do not change the folders or records of others: J-13."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from run_case import NAME, Net, data, edit, every, fit, folders, left_running, record, rows, stopped, trained, watched

from drivetrain import Fit, Logger
from drivetrain._runs import liveness
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


def test_loggers_share_the_runs_folder_or_its_name_below_another_root(tmp_path: Path) -> None:  # J-13
    def loggers() -> list[Logger]:
        beside = CSVLogger(tmp_path / "beside", name="b"), TensorBoardLogger(tmp_path / "beside", name="b")
        return [TensorBoardLogger(tmp_path, name="a"), CSVLogger(tmp_path, name="a"), *beside]

    CSVLogger(tmp_path / "beside", name="a").log_hyperparams({"from": "before"})
    ours = loggers()
    trainer = trained(tmp_path, logger=ours)
    assert trainer.log_dir == str(tmp_path / "a" / "version_1")  # the number is free below each root
    assert [one.version for one in ours] == [1, 1, 1, 1]
    for folder in (tmp_path / "a" / "version_1", tmp_path / "beside" / "a" / "version_1"):
        assert {"metrics.csv"} | {one.name for one in folder.glob("events.*")} <= {one.name for one in folder.iterdir()}
        assert len(list(folder.glob("events.*"))) >= 1
    assert folders(tmp_path / "beside", "a") == ["version_0", "version_1"]
    # A resumed run continues in its folder.
    again = loggers()
    trained(tmp_path, "auto", logger=again, max_epochs=2)
    assert [one.version for one in again] == [1, 1, 1, 1]


def test_two_loggers_that_would_write_one_file_are_refused(tmp_path: Path) -> None:  # J-13
    with pytest.raises(ConfigurationError, match="Two loggers of class CSVLogger have save_dir="):
        trained(tmp_path, logger=[CSVLogger(tmp_path, "a"), CSVLogger(tmp_path, "b")])


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


def test_before_a_run_there_is_no_folder(tmp_path: Path) -> None:  # J-13
    logger = CSVLogger(tmp_path)
    trainer = fit(tmp_path, logger=logger)
    assert (trainer.log_dir, logger.log_dir, logger.version) == (None, None, None)
    assert list(tmp_path.iterdir()) == []
    trainer.fit(Net(), data())
    assert trainer.log_dir == logger.log_dir == str(tmp_path / NAME / "version_0")
    assert logger.version == 0


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
        assert trainer.loggers == []
        assert options is not barebones or (trainer.callbacks, trainer.global_step) == ([], 6)
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
    shared = CSVLogger(root)  # starts a new table for each run
    places = [str(trained(root, logger=logger).log_dir) for logger in (CSVLogger(root), shared, shared)]
    assert len(set(places)) == 3
    bucket, tables = fsspec.filesystem("memory"), set()
    for place in places:
        assert place.startswith(f"{root}/drivetrain_logs/")
        found = {one["name"].rpartition("/")[2] for one in bucket.ls(place.removeprefix("memory:/"))}
        assert {"run.json", "metrics.csv", "checkpoints"} <= found
        tables.add(bucket.cat_file(f"{place}/metrics.csv"))
    assert len(tables) == 1
    assert trained(root, "auto", max_epochs=2).log_dir == places[-1]
    assert len(bucket.ls("/run-folders/drivetrain_logs")) == 3


def test_a_logger_at_a_url_gives_the_folder_on_the_disk_its_name(tmp_path: Path) -> None:  # J-13
    trainer = trained(tmp_path, logger=[CSVLogger(tmp_path), CSVLogger("memory://beside")])
    name = Path(str(trainer.log_dir)).name
    assert trainer.loggers[1].log_dir == f"memory://beside/{NAME}/{name}"
    assert not name.startswith("version_")  # another run may have that number at the URL
    table = fsspec.filesystem("memory").cat_file(f"/beside/{NAME}/{name}/metrics.csv")
    assert Path(str(trainer.log_dir), "metrics.csv").read_bytes() == table


class Minimal(Logger):
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

        given_version = None

        def use_folder(self, folder: str) -> None:
            self.version = Path(folder).name

    trainer = fit(tmp_path, logger=Adopting(tmp_path))
    for number in range(2):
        trainer.fit(Net(), data())
        assert trainer.log_dir == str(tmp_path / "minimal" / f"version_{number}")
        assert trainer.loggers[0].version == f"version_{number}"


def two_roots(root: Path) -> list[CSVLogger]:
    return [CSVLogger(root / "a"), CSVLogger(root / "b")]


class Bare(Net):
    """A module without hyper-parameters, so that nothing is written before the first values."""

    def save_hyperparameters(self, *names: Any, **options: Any) -> None:
        """Do nothing."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_loggers_with_other_roots_continue_in_their_folders(tmp_path: Path) -> None:  # J-13
    for _ in range(2):
        trained(tmp_path, logger=CSVLogger(tmp_path / "b"))
    files = [tmp_path / "b" / NAME / one / "metrics.csv" for one in ("version_0", "version_1")]
    others = [file.read_bytes() for file in files]
    stopped(tmp_path, step=5, logger=two_roots(tmp_path), callbacks=every(2))
    again = trained(tmp_path, "auto", logger=two_roots(tmp_path), callbacks=every(2))
    assert again.log_dir == str(tmp_path / "a" / NAME / "version_2")
    assert [one.version for one in again.loggers] == [2, 2]
    assert rows(tmp_path / "a" / NAME / "version_2") == rows(tmp_path / "b" / NAME / "version_2")
    assert [file.read_bytes() for file in files] == others


def test_simultaneous_runs_have_separate_folders_under_other_roots(tmp_path: Path) -> None:  # J-13
    def other(step: int) -> None:
        if step == 0:  # the loggers of the outer run have not written yet
            inner.append(trained(tmp_path, module=Bare(), logger=two_roots(tmp_path)))

    inner: list[Any] = []
    outer = fit(tmp_path, logger=two_roots(tmp_path))
    outer.fit(Bare(at_step=other), data())
    assert [one.version for one in inner[0].loggers] == [1, 1]
    assert [one.version for one in outer.loggers] == [0, 0]
    steps = [[one["step"] for one in rows(tmp_path / "b" / NAME / version)] for version in ("version_0", "version_1")]
    assert steps == [list("123456")] * 2


def test_an_evaluation_does_not_change_the_record_of_the_training(tmp_path: Path) -> None:  # J-13
    trainer = stopped(tmp_path, step=5, callbacks=every(2))
    before = record(trainer.log_dir)
    assert before["status"] == "failed"
    fit(tmp_path, logger=CSVLogger(tmp_path, version=0)).test(Net(), data(), verbose=False)
    assert record(trainer.log_dir) == before
    trainer.test(Net(), data(), verbose=False)
    assert "test" in rows(trainer.log_dir)[-1]
    after = record(trainer.log_dir)
    for name in ("status", "why", "ended", "parts"):
        assert after[name] == before[name]
    again, module = fit(tmp_path, callbacks=every(2)), Net()
    again.validate(module, data(), verbose=False)
    again.fit(module, data(), ckpt_path="auto")
    assert (again.log_dir, again.run_id) == (trainer.log_dir, trainer.run_id)
    assert [(one["from_step"], one["to_step"]) for one in record(again.log_dir)["parts"]] == [(0, 5), (4, 6)]


def test_a_run_killed_after_its_last_checkpoint_is_finished(tmp_path: Path) -> None:  # J-13
    trainer = trained(tmp_path)
    left_running(trainer.log_dir, began="1")
    trained(tmp_path, "auto")
    after = record(trainer.log_dir)
    assert (after["status"], after["why"]) == ("finished", "max_epochs=1 is reached; nothing was left to train")
    assert [(one["from_step"], one["to_step"]) for one in after["parts"]] == [(0, 6), (6, 6)]
    trained(tmp_path, "auto")
    assert record(trainer.log_dir) == after


def test_a_run_with_malformed_lists_and_remains_of_a_record_resumes(tmp_path: Path) -> None:
    trainer = stopped(tmp_path, step=5, callbacks=every(2))
    edit(trainer.log_dir, checkpoints=[7, None, "x"], events=["y"], parts=[1], loggers=[3])
    remains = Path(str(trainer.log_dir)) / ".run.json-0123456789abcdef"
    remains.write_text("{")
    again = trained(tmp_path, "auto", callbacks=every(2))
    assert (again.log_dir, again.global_step) == (trainer.log_dir, 6)
    assert [one["step"] for one in record(again.log_dir)["checkpoints"]] == [6]
    assert not remains.exists()


@pytest.mark.parametrize("folder", ["nowhere://bucket/version_0", "version_0\0"], ids=["protocol", "null"])
def test_a_checkpoint_of_an_unreachable_run_is_resumed(tmp_path: Path, folder: str, monkeypatch: Any) -> None:  # J-13
    monkeypatch.setattr("drivetrain._engine.checkpoints.checkpoint_manager._absolute", lambda path: folder)
    trained(tmp_path / "there", callbacks=Checkpoint(dirpath=tmp_path / "copied"))
    again = trained(tmp_path / "here", "auto", callbacks=Checkpoint(dirpath=tmp_path / "copied"), max_epochs=2)
    assert again.global_step == 12
    path = str(sorted((tmp_path / "copied").glob("epoch*"))[-1])
    assert trained(tmp_path / "here", path, max_epochs=3).global_step == 18


@pytest.mark.parametrize(("which", "alive"), [(None, False), ("auto", False), ("auto", True)])
def test_a_folder_by_name_is_not_taken_from_a_run_on_another_machine(
    tmp_path: Path, which: str | None, alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # J-13
    folder = Path(str(trained(tmp_path, logger=CSVLogger(tmp_path, version=4)).log_dir))
    left_running(folder, host="elsewhere")
    monkeypatch.setattr(liveness, "POLL_SECONDS", 0.2)
    watched(monkeypatch, folder, alive)
    if alive:
        with pytest.raises(ConfigurationError, match=r"under way \(process \d+ on elsewhere\)"):
            trained(tmp_path, which, logger=CSVLogger(tmp_path, version=4))
    else:
        trained(tmp_path, which, logger=CSVLogger(tmp_path, version=4), max_epochs=2)
    assert (record(folder)["status"] == "running") is alive
    assert [one.name for one in folder.glob("run-*.json")] == ([] if which else ["run-1.json"])


def test_a_failing_logger_does_not_prevent_a_checkpoint(tmp_path: Path, caplog: Any) -> None:  # J-13
    class Offline(CSVLogger):
        def save(self) -> None:
            raise ValueError("no network")

        def finalize(self, status: str) -> None:
            """Do nothing."""

    trainer = trained(tmp_path, logger=Offline(tmp_path))
    assert (trainer.global_step, record(trainer.log_dir)["status"]) == (6, "finished")
    assert [one["step"] for one in record(trainer.log_dir)["checkpoints"]] == [6]
    assert "Offline could not write the values logged so far, and tries again later: no network" in caplog.text


class Wide(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("first", 5.0)
        return super().training_step(batch, batch_idx)


def test_a_table_has_the_columns_of_its_run_or_of_the_folder_in_which_it_continues(tmp_path: Path) -> None:  # J-13
    logger = CSVLogger(tmp_path)
    trained(tmp_path, module=Wide(), logger=logger)
    again = trained(tmp_path, logger=logger)
    assert list(rows(again.log_dir)[0]) == ["step", "epoch", "loss_step", "loss_epoch"]
    folder = Path(str(trained(tmp_path, module=Wide(), max_steps=4).log_dir))
    logger = CSVLogger(tmp_path, version="another")
    logger.log_metrics({"loss_step": 1.0}, 1)
    logger.save()
    logger.use_folder(str(folder))
    logger.rewind(4)
    logger.log_metrics({"loss_step": 9.0}, 5)
    logger.save()
    assert (rows(folder)[-1]["step"], rows(folder)[-1]["loss_step"], rows(folder)[-1]["first"]) == ("5", "9.0", "")


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_values_logged_before_the_run_are_in_its_folder(tmp_path: Path, kind: Any) -> None:  # J-13
    logger = kind(tmp_path)
    logger.log_hyperparams({"of": "the script"})
    assert folders(tmp_path) == ["version_0"]
    trained(tmp_path, logger=logger)
    assert folders(tmp_path) == ["version_0"]
    trained(tmp_path, logger=logger)
    assert folders(tmp_path) == ["version_0", "version_1"]
