"""Which run "auto", "last", "best" and a path resume, and in which folder: J-13."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import run_case
import torch
from run_case import Another, Net, data, every, fit, folders, left_running, record, rows, stopped, trained, version

from drivetrain import Fit
from drivetrain.callbacks import Checkpoint, EarlyStopping
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.loggers import CSVLogger


def test_auto_resumes_the_newest_run_in_its_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # J-13
    trained(tmp_path)
    stopped(tmp_path, step=9, max_epochs=3, callbacks=every(2))
    again = trained(tmp_path, "auto", max_epochs=3, callbacks=every(2))
    assert version(again) == "version_1"
    assert folders(tmp_path) == ["version_0", "version_1"]
    assert "continuing from" in caplog.text
    assert "epoch=1-step=8" in caplog.text
    parts = record(again.log_dir)["parts"]
    steps = [(one["from_step"], one["to_step"], one["status"]) for one in parts]
    assert steps == [(0, 9, "failed"), (8, 18, "finished")]


def test_a_run_of_another_class_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # J-13
    trained(tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint to resume from.*runs of Another"):
        trained(tmp_path, "last", module=Another())
    other = trained(tmp_path, "auto", module=Another())
    assert (other.global_step, version(other)) == (6, "version_1")
    (line,) = re.findall(r"ckpt_path='auto': (.*)", caplog.text)
    skipped = "version_0 (its module is run_case.Net, and this run's module is run_case.Another)"
    assert line == f"a fresh start. Skipped: {skipped}."


def test_a_run_with_other_hyper_parameters_is_skipped(tmp_path: Path, caplog: Any) -> None:  # J-13
    for lr in (0.1, 0.2, 0.3):
        trained(tmp_path, "auto", module=Net(lr))
    assert folders(tmp_path) == ["version_0", "version_1", "version_2"]
    caplog.clear()
    again = trained(tmp_path, "auto", module=Net(0.2), max_epochs=2)
    assert (version(again), again.global_step) == ("version_1", 12)
    assert "version_2 (its hyper-parameters differ: lr=0.3, here 0.2)" in caplog.text


def test_a_running_run_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # J-13
    first = trained(tmp_path)
    left_running(first.log_dir)
    assert version(trained(tmp_path, "auto", max_epochs=2)) == "version_1"
    assert "Skipped: version_0 (it is running, process 1 on " in caplog.text
    runs = tmp_path / "drivetrain_logs"
    assert version(trained(tmp_path, runs / "version_0/checkpoints/epoch=0-step=6", max_epochs=2)) == "version_2"
    # A dead run is resumed, even if its pid now belongs to another process.
    left_running(first.log_dir, pid=1, began="1")
    for other in ("version_1", "version_2"):
        run_case.edit(runs / other, module="another")
    assert version(trained(tmp_path, "auto", max_epochs=2)) == "version_0"


def test_a_run_within_a_run_of_the_same_class_has_its_own_folder(tmp_path: Path) -> None:  # J-13
    inner: list[str] = []

    def train_within(step: int) -> None:
        if step == 3:
            inner.append(version(trained(tmp_path, "auto")))

    outer = fit(tmp_path, callbacks=every(2))
    outer.fit(Net(at_step=train_within), data())
    assert (version(outer), inner) == ("version_0", ["version_1"])


def test_the_rules_apply_to_an_explicit_dirpath(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # J-13
    def run(epochs: int, module: Net) -> tuple[int, str]:
        trainer = trained(tmp_path, "auto", callbacks=Checkpoint(tmp_path / "kept"), module=module, max_epochs=epochs)
        return trainer.global_step, version(trainer)

    assert run(1, Net()) == (6, "version_0")
    assert run(1, Another()) == (6, "version_1")
    assert "its module is run_case.Net, and this run's module is run_case.Another" in caplog.text
    assert run(1, Net(0.5)) == (6, "version_2")
    assert run(2, Net()) == (12, "version_0")
    left_running(tmp_path / "drivetrain_logs/version_0")
    assert run(3, Net()) == (18, "version_3")
    assert "version_0 (it is running" in caplog.text


def test_only_a_path_to_the_newest_checkpoint_continues_in_its_folder(tmp_path: Path) -> None:  # J-13
    trained(tmp_path, callbacks=every(3))
    saved = tmp_path / "drivetrain_logs/version_0/checkpoints"
    newest = trained(tmp_path, saved / "epoch=0-step=6", callbacks=every(3), max_epochs=2)
    assert version(newest) == "version_0"
    older = trained(tmp_path, saved / "epoch=0-step=3", callbacks=every(3), max_epochs=2)
    assert version(older) == "version_1"
    best = trained(tmp_path, "best", callbacks=every(3), max_epochs=3)
    assert version(best) == "version_2"
    for one in (older, best):
        assert record(one.log_dir)["parent"] is not None
    other = fit(tmp_path, max_epochs=3)
    other.fit(Another(), data(), ckpt_path=saved / "epoch=1-step=12", allow=("module",))
    assert (version(other), other.global_step) == ("version_3", 18)
    # Checkpoints elsewhere are resumed from here: a folder that the user chose is kept.
    elsewhere = trained(tmp_path / "new", saved / "epoch=1-step=12", callbacks=every(3), max_epochs=3)
    assert elsewhere.log_dir == str(tmp_path / "new" / "drivetrain_logs" / "version_0")
    assert record(elsewhere.log_dir)["parent"] == record(saved.parent)["id"]


def test_retention_follows_the_run(tmp_path: Path) -> None:  # J-13
    kept = tmp_path / "kept"
    trained(tmp_path, callbacks=Checkpoint(kept, filename="a-{step}"))
    trained(tmp_path, "best", callbacks=Checkpoint(kept, filename="b-{step}"), max_epochs=2)  # a separate run
    assert sorted(one.name for one in kept.glob("*-*")) == ["a-step=6", "b-step=12"]
    trained(tmp_path, "last", callbacks=Checkpoint(kept, filename="c-{step}"), max_epochs=3)  # the same run
    assert sorted(one.name for one in kept.glob("*-*")) == ["a-step=6", "c-step=18"]


@pytest.mark.parametrize(("step", "pace"), [(1, 1), (5, 2), (6, 1), (7, 3), (11, 2)])
def test_logs_of_a_resumed_run_have_every_step_once(tmp_path: Path, step: int, pace: int) -> None:  # J-13
    def run(root: Path, module: Net, ckpt_path: str | None = None) -> Fit:
        logger = CSVLogger(root, flush_logs_every_n_steps=4)
        trainer = fit(root, max_epochs=2, logger=logger, callbacks=every(2), log_every_n_steps=pace)
        trainer.fit(module, data(), data(), ckpt_path=ckpt_path)
        return trainer

    def fail(at: int) -> None:
        if at == step:
            for one in failing.trainer.loggers:
                one.save()  # it may have logged rows after the checkpoint
            raise RuntimeError("killed")

    undisturbed, failing = run(tmp_path / "undisturbed", Net()), Net(at_step=fail)
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path / "killed", failing)
    again = run(tmp_path / "killed", Net(), "auto")
    assert version(again) == ("version_0" if step > 1 else "version_1")  # no checkpoint before the first save
    assert rows(again.log_dir) == rows(undisturbed.log_dir)


def test_the_rows_before_a_checkpoint_are_on_the_disk_when_it_is_saved(tmp_path: Path) -> None:  # J-13
    found: dict[int, list[str]] = {}

    def read(step: int) -> None:
        if step in (3, 5):  # the steps after the saves
            found[step] = [row["step"] for row in rows(trainer.log_dir)]

    trainer = fit(tmp_path, callbacks=every(2), logger=CSVLogger(tmp_path, flush_logs_every_n_steps=100))
    trainer.fit(Net(at_step=read), data())
    assert [steps[-1] for steps in found.values()] == ["2", "4"]


def test_a_finished_run_is_not_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:  # J-13
    caplog.set_level("INFO", "drivetrain")
    first = trained(tmp_path)
    before = {one: one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()}
    again = trained(tmp_path, "auto")
    assert (again.global_step, again.state) == (6, "finished")
    assert "max_epochs=1 is reached" in caplog.text
    assert "nothing was left to train" in caplog.text
    for which in ("last", "best", Path(str(first.log_dir), "checkpoints", "epoch=0-step=6")):
        with pytest.raises(ConfigurationError, match="max_epochs=1 is reached, so that nothing is left to train"):
            trained(tmp_path, which)
    with pytest.raises(ConfigurationError, match="max_steps=6 is reached") as caught:
        trained(tmp_path, "last", max_epochs=9, max_steps=6)
    assert "1 epoch(s) and 6 optimizer step(s)" in caught.value.why
    assert {one: one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()} == before
    assert version(trained(tmp_path, "auto", max_epochs=2)) == "version_0"  # the limit has been raised


def test_an_early_stopped_run_is_finished_unless_it_is_more_patient(tmp_path: Path, caplog: Any) -> None:  # J-13, I-17
    def run(patience: int, which: str = "auto") -> Fit:
        stopping = EarlyStopping("loss_epoch", patience=patience, min_delta=100.0)
        return trained(tmp_path, which, callbacks=[stopping, Checkpoint()], max_epochs=6)

    caplog.set_level("INFO", "drivetrain")
    first = run(1)
    assert first.global_step < 36
    assert record(first.log_dir)["status"] == "finished"
    assert "EarlyStopping" in record(first.log_dir)["why"]
    assert run(1).global_step == first.global_step
    assert "EarlyStopping has ended the run" in caplog.text
    with pytest.raises(ConfigurationError, match="EarlyStopping has ended the run: loss_epoch did not improve"):
        run(1, "last")
    more = run(3)
    assert more.global_step > first.global_step
    assert version(more) == "version_0"


def test_a_requeued_job_without_checkpoints_restarts_in_its_folder(tmp_path: Path, monkeypatch: Any) -> None:  # J-13
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    early = stopped(tmp_path, step=1)
    again = trained(tmp_path, "auto")
    assert again.log_dir == early.log_dir
    assert [row["step"] for row in rows(again.log_dir)] == ["1", "2", "3", "4", "5", "6"]
    assert folders(tmp_path) == ["version_0"]


@pytest.mark.parametrize(
    ("alive", "ended", "folder"),
    [(False, {}, "version_0"), (True, {}, "version_1"), (True, {"status": "finished"}, "version_0")],
    ids=["silent", "alive", "ends meanwhile"],
)
def test_runs_on_other_machines_are_judged_by_heartbeats(
    tmp_path: Path, alive: bool, ended: dict[str, str], folder: str, monkeypatch: Any, caplog: Any
) -> None:  # J-13
    first = trained(tmp_path)
    left_running(first.log_dir, host="another")
    run_case.watched(monkeypatch, first.log_dir, alive, **ended)
    again = trained(tmp_path, "auto", max_epochs=2)
    assert "version_0 may be under way on another machine. This run watches the record of that run for" in caplog.text
    assert version(again) == folder


def test_only_a_run_to_be_resumed_is_watched(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:  # J-13
    older, _ = trained(tmp_path), trained(tmp_path)
    left_running(older.log_dir, host="another")
    monkeypatch.setattr("drivetrain._runs.liveness.WATCH_SECONDS", 1000.0)
    newer = trained(tmp_path, "auto", max_epochs=2)
    path = Path(str(newer.log_dir), "checkpoints", "epoch=1-step=12")
    assert [version(one) for one in (newer, trained(tmp_path, path, max_epochs=3))] == ["version_1"] * 2
    assert "watches the record" not in caplog.text


def test_heartbeats_are_written_during_a_long_step(tmp_path: Path, monkeypatch: Any) -> None:  # J-13, N-06
    monkeypatch.setattr("drivetrain._runs.liveness.HEARTBEAT_SECONDS", 0.02)
    beats: set[str] = set()
    trainer = fit(tmp_path)

    def watch(step: int) -> None:
        while len(beats) < 3 * (step + 1):
            beats.add(record(trainer.log_dir)["heartbeat"])

    trainer.fit(Net(at_step=watch), data())
    assert len(beats) >= 18
    ended = record(trainer.log_dir)
    assert (ended["status"], ended["why"]) == ("finished", "max_epochs=1 is reached")


def test_an_evaluation_uses_a_running_run_and_watches_nothing(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    first = trained(tmp_path)
    left_running(first.log_dir, host="another")
    monkeypatch.setattr("drivetrain._runs.liveness.WATCH_SECONDS", 1000.0)
    module = Net()
    torch.nn.init.zeros_(module.net.weight)
    fit(tmp_path).validate(module, data(), ckpt_path="last", verbose=False)
    assert module.net.weight.abs().sum() > 0
    assert "watches the record" not in caplog.text
