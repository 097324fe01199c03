"""The content of run.json, when it is written, and how it is read: J-13, N-06."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from run_case import Net, data, fit, folders, record, trained

from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import _discovery
from drivetrain.checkpoint._format import StorageError
from drivetrain.runs import _record
from faulty_store import FaultyStore


def test_a_record_describes_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # J-13, N-06
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1", "--api_token", "hush", "--db.password=hush"])
    monkeypatch.setenv("DRIVETRAIN_LOG_EVERY_N_STEPS", "2")
    monkeypatch.chdir(tmp_path)
    trainer = fit(tmp_path, max_epochs=2)
    trainer.fit(Net(0.3), data())
    said = record(trainer.log_dir)
    assert said["id"] == trainer.run_id
    assert said["module"] == "run_case.Net"
    assert said["name"] == "drivetrain_logs"
    assert said["hyper_parameters"] == {"lr": 0.3}
    assert said["stage"] == "fit"
    assert said["settings"]["max_epochs"] == {"value": 2, "source": "code"}
    assert said["settings"]["min_epochs"] == {"value": None, "source": "default"}
    assert said["settings"]["callbacks"]["value"] == "drivetrain.callbacks.checkpoint.Checkpoint"
    assert said["argv"][1:] == ["train.py", "--lr", "0.1", "--api_token", "...", "--db.password=..."]
    assert "hush" not in json.dumps(said)
    assert said["working_directory"] == str(tmp_path)
    assert {"python", "torch", "drivetrain"} <= said["versions"].keys()
    assert (said["strategy"], said["world_size"], said["device"]) == ("single_device", 1, "cpu")
    assert "32-true" in said["precision"]
    assert said["process"]["pid"] == os.getpid()
    assert said["data"] == {"samples": 24, "order": ["in order"], "batches": 6, "batch_size": 4}
    assert (said["status"], said["why"]) == ("finished", "max_epochs=2 is reached")
    assert said["started"] <= said["ended"] <= said["heartbeat"]
    assert [(one["path"], one["step"], one["epoch"]) for one in said["checkpoints"]] == [
        ("checkpoints/epoch=1-step=12", 12, 2)
    ]
    (part,) = said["parts"]
    assert (part["seed"], part["batch_size"], part["from_step"], part["to_step"]) == (0, 4, 0, 12)


def test_a_step_does_not_write_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # H-01
    written: list[int] = []
    original = _record.encode_record
    trainer = fit(tmp_path, max_epochs=1, callbacks=Checkpoint(every_n_train_steps=4, save_top_k=-1))
    monkeypatch.setattr(
        _record,
        "encode_record",
        lambda document: (written.append(trainer.global_step), original(document))[1],  # type: ignore[func-returns-value]
    )
    trainer.fit(Net(), data())
    assert [step for step in written if 0 < step < 6] == [4]
    assert written.count(0) == 3  # claimed, begun, training
    assert written.count(6) == 1


def test_a_failed_write_is_warned_about_once_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original, failing = os.replace, [False]

    def replace(source: Any, target: Any) -> None:
        if failing[0] and str(target).endswith("run.json"):
            raise OSError(28, "No space left on device")
        original(source, target)

    monkeypatch.setattr(os, "replace", replace)

    def at(step: int) -> None:
        failing[0] = 1 <= step < 5

    saver = Checkpoint(every_n_train_steps=1, save_top_k=-1)
    trainer = trained(tmp_path, module=Net(at_step=at), callbacks=saver)
    assert caplog.text.count("cannot be written. The next update tries again") == 1
    assert len(record(trainer.log_dir)["checkpoints"]) == 6
    assert sorted(one.name for one in Path(str(trainer.log_dir)).glob("run.json*")) == ["run.json"]


def test_two_runs_in_one_folder_are_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = fit(tmp_path, callbacks=Checkpoint(every_n_train_steps=2, save_top_k=-1))
    theirs: list[dict[str, Any]] = []

    def at(step: int) -> None:
        if step == 3:
            said = record(trainer.log_dir)
            said["parts"].append({"token": "theirs"})
            (Path(str(trainer.log_dir)) / "run.json").write_text(json.dumps(said))
            theirs.append(said)

    trainer.fit(Net(at_step=at), data())
    assert caplog.text.count("now belongs to another run") == 1
    assert record(trainer.log_dir) == theirs[0]


HOSTILE = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"format": 1}',
    b'{"format": 1, "id": 3}',
    b'{"format": 2, "id": "a"}',
    b"[" * 100_000,
    b'{"format": 1, "id": "a", "stage": "fit", "module": 1, "hyper_parameters": []}',
    b'{"format": 1, "id": "a", "stage": ["fit"], "status": {}, "started": 7, "parts": 1, "loggers": [1], "job": {}}',
    b'{"format": 1, "id": "a", "stage": "fit", "module": "run_case.Net", "name": "drivetrain_logs", '
    b'"hyper_parameters": {"lr": 0.1}, "status": "running", "process": [], "parts": [[]], '
    b'"loggers": [{"version": "../x"}], "events": 3, "checkpoints": {}, "started": null}',
    b"\xff\xfe",
    b"NaN",
]


@pytest.mark.parametrize("content", HOSTILE, ids=lambda one: repr(one[:24]))
def test_a_record_with_arbitrary_content_is_tolerated(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:  # J-13
    from drivetrain.runs import _liveness

    monkeypatch.setattr(_liveness, "WATCH_SECONDS", 0.0)
    trained(tmp_path)
    neighbour = tmp_path / "drivetrain_logs" / "version_1"
    neighbour.mkdir()
    (neighbour / "run.json").write_bytes(content)
    again = trained(tmp_path, "auto", max_epochs=2)
    assert Path(str(again.log_dir)).name == "version_0"
    assert again.global_step == 12
    assert folders(tmp_path) == ["version_0", "version_1"]


def test_values_unknown_to_json_are_stored_as_text() -> None:
    class Odd:
        pass

    values = {"nan": float("nan"), "big": 2**70, "path": Path("a"), "odd": Odd(), "kind": Odd, 3: (1, {2})}
    found = _record.plain(values)
    name = f"{__name__}.test_values_unknown_to_json_are_stored_as_text.<locals>.Odd"
    assert found == {"nan": "nan", "big": str(2**70), "path": "a", "odd": name, "kind": name, "3": [1, [2]]}
    assert json.loads(_record.encode_record(found)) == found


def test_a_refusing_store_is_retried_and_not_considered_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # J-13
    monkeypatch.setattr(_discovery, "_FIRST_PAUSE", 0.01)
    store = FaultyStore(tmp_path).mount()
    first = trained(store.url)
    store.fail("get", "*/run.json", times=3)
    again = trained(store.url, "auto", max_epochs=2)
    assert (again.log_dir, again.global_step) == (first.log_dir, 12)
    monkeypatch.setattr(_discovery, "RETRY_SECONDS", 0.05)
    store.fail("get", "*/run.json", times=None)
    with pytest.raises(StorageError, match=r"run\.json' cannot be read"):
        trained(store.url, "auto", max_epochs=3)
