"""Distinguishing live runs from killed ones: J-13."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from drivetrain.runs import _process
from drivetrain.runs._liveness import is_alive, running_ids
from drivetrain.runs._process import Job, Process
from drivetrain.runs._record import Record
from drivetrain.testing import requires_linux

pytestmark = requires_linux()


def test_a_process_lives_until_it_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    seen = replace(Process.here(), pid=child.pid, began=_process._start_time(child.pid))
    assert seen.is_alive() is True
    assert Process.from_json(seen.as_json()) == seen
    child.send_signal(signal.SIGKILL)
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert seen.is_alive() is False  # a zombie that its parent has not reaped
    child.wait()
    assert seen.is_alive() is False


def test_a_process_of_another_user_is_alive_and_one_of_another_machine_unknown(monkeypatch: Any) -> None:
    def forbidden(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbidden)
    here = Process.here()
    assert here.is_alive() is True
    assert replace(here, began="1").is_alive() is False
    monkeypatch.setattr(_process, "_start_time", lambda pid: "")  # hidden by the system
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
    assert Job.from_json([one.as_json() for one in jobs]) == jobs
    assert Job.of({}) == Job.of({"TORCHELASTIC_RUN_ID": "none"}) == []


def _running(process: Process, *jobs: Job) -> Record:
    document = {"id": "a", "status": "running", "process": process.as_json(), "job": [one.as_json() for one in jobs]}
    return Record("runs/version_0", document)


def test_the_liveness_of_a_recorded_run() -> None:
    here, away = Process.here(), replace(Process.here(), host="another")
    first = replace(here, pid=1, began=_process._start_time(1))
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
