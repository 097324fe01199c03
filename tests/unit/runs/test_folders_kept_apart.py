"""Runs, and loggers that several runs use, do not change other runs' folders or records: J-13."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from run_case import NAME, Net, data, edit, every, fit, folders, left_running, record, rows, stopped, trained, watched

from drivetrain._engine import checkpoints, run_start
from drivetrain.callbacks import Checkpoint
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger, TensorBoardLogger
from drivetrain.runs import _resume_choice


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
    assert again.log_dir == str(tmp_path / "a" / NAME / "version_0")
    assert [one.version for one in again.loggers] == [0, 2]
    assert rows(tmp_path / "a" / NAME / "version_0") == rows(tmp_path / "b" / NAME / "version_2")
    assert [file.read_bytes() for file in files] == others


def test_simultaneous_runs_have_separate_folders_under_other_roots(tmp_path: Path) -> None:  # J-13
    def other(step: int) -> None:
        if step == 0:  # the outer run has announced a version, but has not written yet
            inner.append(trained(tmp_path, module=Bare(), logger=two_roots(tmp_path)))

    inner: list[Any] = []
    outer = fit(tmp_path, logger=two_roots(tmp_path))
    outer.fit(Bare(at_step=other), data())
    assert [one.version for one in inner[0].loggers] == [1, 0]
    assert [one.version for one in outer.loggers] == [0, 1]
    assert [one["version"] for one in record(outer.log_dir)["loggers"]] == ["version_0", "version_1"]
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
    assert (after["status"], after["why"]) == ("finished", "max_epochs=1 is reached")
    assert [(one["from_step"], one["to_step"]) for one in after["parts"]] == [(0, 6), (6, 6)]
    trained(tmp_path, "auto")
    assert record(trainer.log_dir) == after


def test_a_run_with_malformed_lists_and_remains_of_a_record_resumes(tmp_path: Path) -> None:
    trainer = stopped(tmp_path, step=5, callbacks=every(2))
    edit(trainer.log_dir, checkpoints=[7, None, "x"], events=["y"], parts=[1], loggers=[3])
    remains = Path(str(trainer.log_dir)) / "run.json.0a1b2c3d.new"
    remains.write_text("{")
    again = trained(tmp_path, "auto", callbacks=every(2))
    assert (again.log_dir, again.global_step) == (trainer.log_dir, 6)
    assert [one["step"] for one in record(again.log_dir)["checkpoints"]] == [6]
    assert not remains.exists()


@pytest.mark.parametrize("folder", ["nowhere://bucket/version_0", "version_0\0"], ids=["protocol", "null"])
def test_a_checkpoint_of_an_unreachable_run_is_resumed(tmp_path: Path, folder: str, monkeypatch: Any) -> None:  # J-13
    monkeypatch.setattr(_resume_choice, "_SHORT_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(checkpoints, "_absolute", lambda path: folder)
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
    monkeypatch.setattr(run_start, "_POLL_INTERVAL", 0.2)
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


def test_a_record_without_permission_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained(tmp_path)
    foreign = tmp_path / NAME / "foreign"
    foreign.mkdir()
    (foreign / "run.json").write_text("{}")
    (foreign.parent / "loop").symlink_to(foreign.parent / "loop")
    original = open

    def refuse(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).endswith("foreign/run.json"):
            raise PermissionError(13, "Permission denied")
        return original(path, *args, **options)

    monkeypatch.setattr("builtins.open", refuse)
    assert trained(tmp_path, "auto", max_epochs=2).log_dir == trainer.log_dir


class Wide(Net):
    """Logs an additional value first."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("first", 5.0)
        return super().training_step(batch, batch_idx)


def test_a_reused_logger_starts_a_table_with_the_columns_of_its_run(tmp_path: Path) -> None:  # J-13
    logger = CSVLogger(tmp_path)
    trained(tmp_path, module=Wide(), logger=logger)
    again = trained(tmp_path, logger=logger)
    assert list(rows(again.log_dir)[0]) == ["step", "epoch", "loss_step", "loss_epoch"]


def test_a_logger_that_continues_in_another_folder_keeps_its_columns(tmp_path: Path) -> None:  # J-13
    folder = Path(str(trained(tmp_path, module=Wide(), max_steps=4).log_dir))
    logger = CSVLogger(tmp_path, version="another")
    logger.log_metrics({"loss_step": 1.0}, 1)
    logger.save()
    logger.adopt(folder.name)
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
