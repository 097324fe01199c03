"""run.json: content, schema (docs/run.schema.json), when it is written, how it is read, and who lives: J-13, N-06."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError
from run_case import Net, data, every, fit, folders, record, rows, trained

from drivetrain import Callback
from drivetrain._runs import liveness, process, start_search
from drivetrain._runs import record as record_file
from drivetrain._runs.liveness import is_alive, running_ids
from drivetrain._runs.process import Job, Process
from drivetrain._runs.record import FAILED, FINISHED, FORMAT, INTERRUPTED, RUNNING, Record
from drivetrain._storage.folder import StorageError
from drivetrain.callbacks import Checkpoint
from drivetrain.loggers import CSVLogger
from drivetrain.testing import requires_linux
from faulty_store import FaultyStore

SCHEMA: dict[str, Any] = json.loads((Path(__file__).parents[3] / "docs" / "run.schema.json").read_text())


def parts_of(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schema and its sub-schemas, except for conditions."""
    if isinstance(schema, dict):
        yield schema
        within = [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values(), *schema.get("anyOf", [])]
        for one in (*within, schema.get("items"), schema.get("additionalProperties")):
            yield from parts_of(one)


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with unknown fields forbidden, so that a new field must be added to it."""
    closed = copy.deepcopy(schema)
    for one in parts_of(closed):
        if "properties" in one:
            one["additionalProperties"] = False
    return closed


OPEN, STRICT = Draft202012Validator(SCHEMA), Draft202012Validator(strict(SCHEMA))


def validated(folder: Any) -> dict[str, Any]:
    """Return the record in a folder after validating it against the strict schema."""
    found = record(folder)
    STRICT.validate(found)
    return found


class Configured(Net):
    """Has hyper-parameters that JSON cannot express, and a secret."""

    def __init__(self, lr: float = 0.3, shape: Any = (2, 1), limit: float = math.inf, api_token: str = "hf_x") -> None:
        super().__init__(lr)
        self.save_hyperparameters()


def test_a_record_describes_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # J-13, N-06
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1", "--api_token", "hush", "--db.password=hush"])
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_STEP_ID": "0", "TORCHELASTIC_RUN_ID": "mine"}
    for name, value in {**job, "DRIVETRAIN_GRADIENT_CLIP_VAL": "0.5"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    meanwhile: list[dict[str, Any]] = []
    module, savers = Configured(), [Checkpoint(), Checkpoint(tmp_path / "elsewhere")]
    trainer = fit(tmp_path, max_epochs=2, callbacks=savers, logger=["csv", CSVLogger(tmp_path / "b", "b")])
    module.at_step = lambda step: meanwhile.append(validated(trainer.log_dir))
    trainer.fit(module, data(shuffle=True))
    before, found = meanwhile[-1], validated(trainer.log_dir)
    assert (before["status"], before["ended"], before["parts"][0]["to_step"]) == (RUNNING, None, None)
    assert (found["status"], found["why"]) == (FINISHED, "max_epochs=2 is reached")
    assert found["started"] <= found["ended"] <= found["heartbeat"]
    assert (found["id"], found["name"], found["stage"]) == (trainer.run_id, "drivetrain_logs", "fit")
    assert found["module"] == "test_records.Configured"
    assert found["hyper_parameters"] == {"lr": 0.3, "shape": {"$tuple": [2, 1]}, "limit": {"$float": "inf"}}
    assert found["settings"]["max_epochs"] == {"value": 2, "source": "code"}
    assert found["settings"]["min_epochs"] == {"value": None, "source": "default"}
    assert found["settings"]["callbacks"]["value"] == ["drivetrain.callbacks.checkpoint.Checkpoint"] * 2
    assert found["settings"]["gradient_clip_val"]["source"] == "environment DRIVETRAIN_GRADIENT_CLIP_VAL"
    assert found["argv"][1:] == ["train.py", "--lr", "0.1", "--api_token", "...", "--db.password=..."]
    assert "hush" not in json.dumps(found)
    assert found["working_directory"] == str(tmp_path)
    assert {"python", "torch", "drivetrain"} <= found["versions"].keys()
    assert (found["strategy"], found["world_size"], found["device"]) == ("single_device", 1, "cpu")
    assert "32-true" in found["precision"]
    assert found["process"]["pid"] == os.getpid()
    assert [(one["kind"], one["name"]) for one in found["job"]] == [("slurm", "7"), ("elastic", "mine")]
    assert found["data"] == {"samples": 24, "order": ["shuffled"], "batches": 6, "batch_size": 4}
    assert {(one["path"], one["step"], one["epoch"]) for one in found["checkpoints"]} == {
        ("checkpoints/epoch=1-step=12", 12, 2),
        (str(tmp_path / "elsewhere" / "epoch=1-step=12"), 12, 2),
    }
    (part,) = found["parts"]
    assert (part["seed"], part["batch_size"], part["from_step"], part["to_step"]) == (0, 4, 0, 12)


def test_a_preempted_run_resumes_in_its_record_and_folder(tmp_path: Path) -> None:  # J-13
    def preempt(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = fit(tmp_path)
    with pytest.raises(SystemExit):
        trainer.fit(Net(at_step=preempt), data())
    left = validated(trainer.log_dir)
    assert (left["status"], left["why"]) == (INTERRUPTED, "SIGTERM asked it to save and leave")
    (checkpoint,) = left["checkpoints"]
    again = trained(tmp_path, "auto")
    assert again.log_dir == trainer.log_dir
    assert [row["step"] for row in rows(again.log_dir)] == ["1", "2", "3", "4", "5", "6"]
    resumed = validated(again.log_dir)
    assert (resumed["id"], resumed["status"]) == (left["id"], FINISHED)
    steps = [(part["status"], part["from_step"], part["to_step"]) for part in resumed["parts"]]
    assert steps == [(INTERRUPTED, 0, 3), (FINISHED, 3, 6)]
    assert resumed["parts"][1]["from_checkpoint"] == checkpoint["id"]
    assert [(event["kind"], event["step"]) for event in resumed["events"]] == [("began", 0), ("resumed", 3)]


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("boom\n" * 1000), FAILED), (KeyboardInterrupt(), INTERRUPTED)]
)
def test_an_error_that_ends_the_run_is_recorded(tmp_path: Path, error: BaseException, status: str) -> None:
    def fail(step: int) -> None:
        raise error

    trainer = fit(tmp_path)
    with pytest.raises(type(error)):
        trainer.fit(Net(at_step=fail), data())
    found = validated(trainer.log_dir)
    assert found["status"] == found["parts"][0]["status"] == status
    assert found["why"].startswith(type(error).__name__)
    assert len(found["why"]) <= 2000


def test_the_schema_describes_every_field_and_refuses_invalid_records(tmp_path: Path) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["format"]["const"] == FORMAT
    assert SCHEMA["$defs"]["status"]["enum"] == [RUNNING, FINISHED, INTERRUPTED, FAILED]
    for one in parts_of(SCHEMA):
        for name, field in one.get("properties", {}).items():
            assert field.get("description", "").endswith("."), f"{name} has no description"
    found = validated(trained(tmp_path).log_dir)
    for key in found:
        with pytest.raises(ValidationError, match=f"'{key}' is a required property"):
            OPEN.validate({name: value for name, value in found.items() if name != key})
    for name in ("process", "data", "parts", "checkpoints", "events"):
        entries = found[name] if isinstance(found[name], list) else [found[name]]
        for key in entries[0]:
            lacking: Any = {at: value for at, value in entries[0].items() if at != key}
            with pytest.raises(ValidationError):
                OPEN.validate(found | {name: [lacking] if isinstance(found[name], list) else lacking})
    wrongs: tuple[dict[str, Any], ...] = (
        {"status": "killed"},
        {"status": RUNNING},  # with an end time
        {"ended": None},
        {"format": FORMAT + 1},
        {"started": "2026-11-23 13:32:04"},
        {"parts": []},
        {"world_size": 0},
        {"stage": "fitting"},
    )
    for wrong in wrongs:
        with pytest.raises(ValidationError):
            OPEN.validate(found | wrong)
    assert validated(trained(tmp_path, "best", max_epochs=2).log_dir)["parent"] == found["id"]
    evaluating = fit(tmp_path / "evaluation")
    evaluating.test(Net(), data(), verbose=False)
    assert validated(evaluating.log_dir)["data"] is None
    later = found | {"added": 1, "events": [{**found["events"][0], "added": 2}]}  # fields of a later version
    OPEN.validate(later)
    with pytest.raises(ValidationError, match="'added' was unexpected"):
        STRICT.validate(later)


def test_a_step_does_not_write_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # H-01
    written: list[int] = []
    original = record_file.encode_record
    trainer = fit(tmp_path, callbacks=every(4))

    def encode(document: Any) -> Any:
        written.append(trainer.global_step)
        return original(document)

    monkeypatch.setattr(record_file, "encode_record", encode)
    trainer.fit(Net(), data())
    assert [step for step in written if 0 < step < 6] == [4]
    assert written.count(0) == 2  # claimed, training
    assert written.count(6) == 1


def test_a_failed_write_is_warned_about_once_and_retried(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    original, failing = os.replace, [False]

    def replace(source: Any, target: Any) -> None:
        if failing[0] and str(target).endswith("run.json"):
            raise OSError(28, "No space left on device")
        original(source, target)

    def at(step: int) -> None:
        failing[0] = 1 <= step < 5

    monkeypatch.setattr(os, "replace", replace)
    trainer = trained(tmp_path, module=Net(at_step=at), callbacks=every(1))
    assert caplog.text.count("cannot be written. The next update tries again") == 1
    assert len(record(trainer.log_dir)["checkpoints"]) == 6
    assert sorted(one.name for one in Path(str(trainer.log_dir)).glob("run.json*")) == ["run.json"]


def test_two_runs_in_one_folder_are_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = fit(tmp_path, callbacks=every(2))
    theirs: list[dict[str, Any]] = []

    def at(step: int) -> None:
        if step == 3:
            theirs.append(record(trainer.log_dir))
            theirs[0]["parts"].append({"token": "theirs"})
            (Path(str(trainer.log_dir)) / "run.json").write_text(json.dumps(theirs[0]))

    trainer.fit(Net(at_step=at), data())
    assert caplog.text.count("now belongs to another run") == 1
    assert record(trainer.log_dir) == theirs[0]


@pytest.mark.parametrize("another_writes", [False, True])
def test_a_resume_that_fails_before_training_restores_its_record(tmp_path: Path, another_writes: bool) -> None:  # J-13
    first = trained(tmp_path)
    expected = record(first.log_dir)

    class Failing(Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            found = record(first.log_dir)
            assert (found["status"], len(found["parts"])) == (RUNNING, 2)
            if another_writes:
                expected.update(found, parts=[*found["parts"], {"token": "theirs"}])
                (Path(str(first.log_dir)) / "run.json").write_text(json.dumps(expected))
            raise ValueError("before training")

    with pytest.raises(ValueError, match="before training"):
        trained(tmp_path, "auto", max_epochs=2, callbacks=[Checkpoint(), Failing()])
    assert record(first.log_dir) == expected


HOSTILE = [
    *(b"", b"{", b"[]", b"null", b"\xff\xfe", b"NaN", b"[" * 100_000),
    *(b'{"format": 1}', b'{"format": 1, "id": 3}', b'{"format": 2, "id": "a"}'),
    b'{"format": 1, "id": "a", "stage": "fit", "module": 1, "hyper_parameters": []}',
    b'{"format": 1, "id": "a", "stage": ["fit"], "status": {}, "started": 7, "parts": 1, "loggers": [1], "job": {}}',
    b'{"format": 1, "id": "a", "stage": "fit", "module": "run_case.Net", "name": "drivetrain_logs", '
    b'"hyper_parameters": {"lr": 0.1}, "status": "running", "process": [], "parts": [[]], '
    b'"loggers": [{"version": "../x"}], "events": 3, "checkpoints": {}, "started": null}',
]


def test_records_with_arbitrary_content_are_tolerated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # J-13
    monkeypatch.setattr(liveness, "WATCH_SECONDS", 0.0)
    trained(tmp_path)
    for number, content in enumerate(HOSTILE, 1):
        neighbour = tmp_path / "drivetrain_logs" / f"version_{number}"
        neighbour.mkdir()
        (neighbour / "run.json").write_bytes(content)
    again = trained(tmp_path, "auto", max_epochs=2)
    assert Path(str(again.log_dir)).name == "version_0"
    assert again.global_step == 12
    assert len(folders(tmp_path)) == 1 + len(HOSTILE)


def test_values_unknown_to_json_are_stored_as_text() -> None:
    class Odd:
        pass

    values = {"nan": float("nan"), "big": 2**70, "path": Path("a"), "odd": Odd(), "kind": Odd, 3: (1, {2})}
    found = record_file.plain(values)
    name = f"{__name__}.test_values_unknown_to_json_are_stored_as_text.<locals>.Odd"
    assert found == {"nan": "nan", "big": str(2**70), "path": "a", "odd": name, "kind": name, "3": [1, [2]]}
    assert json.loads(record_file.encode_record(found)) == found


def test_a_refusing_store_is_retried_and_not_considered_empty(tmp_path: Path, monkeypatch: Any) -> None:  # J-13
    monkeypatch.setattr(start_search, "_FIRST_PAUSE", 0.01)
    store = FaultyStore(tmp_path).mount()
    first = trained(store.url)
    store.fail("get", "*/run.json", times=3)
    again = trained(store.url, "auto", max_epochs=2)
    assert (again.log_dir, again.global_step) == (first.log_dir, 12)
    monkeypatch.setattr(start_search, "RETRY_SECONDS", 0.05)
    store.fail("get", "*/run.json", times=None)
    with pytest.raises(StorageError, match=r"run\.json' cannot be read"):
        trained(store.url, "auto", max_epochs=3)


@requires_linux()
def test_a_process_lives_until_it_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    seen = replace(Process.here(), pid=child.pid, began=process._start_time(child.pid))
    assert seen.is_alive() is True
    assert Process.from_json(asdict(seen)) == seen
    child.send_signal(signal.SIGKILL)
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert seen.is_alive() is False  # a zombie that its parent has not reaped
    child.wait()
    assert seen.is_alive() is False


@requires_linux()
def test_a_process_of_another_user_is_alive_and_one_of_another_machine_unknown(monkeypatch: Any) -> None:
    def forbidden(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbidden)
    here = Process.here()
    assert here.is_alive() is True
    assert replace(here, began="1").is_alive() is False
    monkeypatch.setattr(process, "_start_time", lambda pid: "")  # hidden by the system
    assert here.is_alive() is True
    for other in (replace(here, host="another"), replace(here, boot="before"), replace(here, namespace="pid:[1]")):
        assert other.is_alive() is None


def test_jobs_of_slurm_and_torchrun_and_invalid_entries() -> None:
    for document in (None, 3, {}, {"pid": "1"}, {"pid": -1}, {"pid": True}, {"pid": 1, "host": 2}, {"pid": 2**40}):
        assert Process.from_json(document) is None
        assert Job.from_json(document) == Job.from_json([document]) == []
    slurm = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_STEP_ID": "0"}
    jobs = Job.of({**slurm, "TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "x"})
    assert jobs == [Job("slurm", "7", 2, "0"), Job("elastic", "mine", 0)]
    assert Job.from_json([asdict(one) for one in jobs]) == jobs
    assert Job.of({}) == Job.of({"TORCHELASTIC_RUN_ID": "none"}) == []


def _running(process: Process, *jobs: Job) -> Record:
    document = {"id": "a", "status": "running", "process": asdict(process), "job": [asdict(one) for one in jobs]}
    return Record("runs/version_0", document)


@requires_linux()
def test_the_liveness_of_a_recorded_run() -> None:
    here, away = Process.here(), replace(Process.here(), host="another")
    first = replace(here, pid=1, began=process._start_time(1))
    ours, requeued = Job("slurm", "7"), Job("slurm", "7", restarts=1)
    assert is_alive(Record("f", {"status": "finished"}), []) is False
    assert is_alive(Record("f", {"status": "running"}), []) is None  # the record names no process
    assert is_alive(_running(here), []) is False  # this process runs no such run
    running_ids.add("a")
    try:
        assert is_alive(_running(here), []) is True
    finally:
        running_ids.discard("a")
    assert is_alive(_running(away), [ours]) is None
    assert is_alive(_running(away, ours), [ours]) is False
    assert is_alive(_running(away, ours), [requeued]) is False
    assert is_alive(_running(first, ours), [requeued]) is False
    assert is_alive(_running(first, ours), [ours]) is True
    step = replace(ours, step="1")
    assert is_alive(_running(away, step), [replace(ours, step="2")]) is None
    assert is_alive(_running(away, Job("elastic", "x", 3)), [Job("elastic", "x", 3)]) is False
