"""Where a run begins, as a function of what is on the disk and what was asked, without a disk: J-13."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain._format import CheckpointMetadata
from drivetrain._runs.identity import Identity
from drivetrain._runs.process import Job
from drivetrain._runs.record import Record
from drivetrain._runs.start_decision import Found, StartRequest, decide

JOB = Job("slurm", "7", 1)


def run(number: int, status: str = "finished", jobs: Any = None, folder: str = "runs", **entries: Any) -> Any:
    document = {"id": f"id{number}", "stage": "fit", "started": f"2026-01-0{number + 1}", "status": status, **entries}
    return Record(f"{folder}/version_{number}", {**document, "job": [asdict(job) for job in jobs or []]})


def saved(number: int, name: str, written: str = "1", lineage: tuple[tuple[str, int], ...] = ()) -> Any:
    metadata = CheckpointMetadata(run={"id": f"id{number}"}, lineage=lineage)
    return SimpleNamespace(path=name, manifest=SimpleNamespace(identifier=name, written=written, metadata=metadata))


def on_disk(*runs: Any, checkpoints: Any = (), **found: Any) -> Found:
    return Found({each.id: each for each in runs}, list(checkpoints), **found)


def asked(ckpt_path: str | None, is_fit: bool = True, **more: Any) -> StartRequest:
    return StartRequest(ckpt_path, is_fit, Identity("Net", "runs", {}), [JOB], "runs", **more)


OLD, NEW, ELSEWHERE = run(0), run(1), run(1, folder="others")
REMOTE = run(1, "running", process={"host": "elsewhere", "pid": 1})
REQUEUED, STOPPED = run(0, jobs=[Job("slurm", "7")]), run(0, "interrupted", jobs=[Job("slurm", "7")])
EVALUATED = run(0, stage="test")
A, B = saved(0, "a", "1"), saved(1, "b", "2")
CASES: dict[str, tuple[Found, StartRequest, dict[str, Any]]] = {
    "nothing is asked": (on_disk(OLD, checkpoints=[A]), asked(None), {}),
    "nothing is there": (on_disk(), asked("auto"), {}),
    "the newest": (
        on_disk(OLD, NEW, checkpoints=[A, B]),
        asked("auto"),
        {"path": "b", "resumes": NEW, "parent": "id1"},
    ),
    "the newest by lineage": (
        on_disk(OLD, NEW, checkpoints=[saved(0, "a", "1", (("x", 1), ("y", 1))), saved(1, "b", "2", (("x", 1),))]),
        asked("last"),
        {"path": "a", "resumes": OLD, "parent": "id0"},
    ),
    "the best begins its own folder": (on_disk(OLD, checkpoints=[A]), asked("best"), {"path": "a", "parent": "id0"}),
    "a run elsewhere keeps its folder": (
        on_disk(ELSEWHERE, checkpoints=[B]),
        asked("auto"),
        {"path": "b", "parent": "id1"},
    ),
    "a live run is passed over": (
        on_disk(OLD, REMOTE, checkpoints=[A, B], alive={REMOTE.folder: True}),
        asked("auto"),
        {
            "path": "a",
            "resumes": OLD,
            "parent": "id0",
            "skipped": ("version_1 (it is running, process 1 on elsewhere)",),
        },
    ),
    "a silent run is watched": (
        on_disk(OLD, REMOTE, checkpoints=[A, B]),
        asked("auto"),
        {"path": "b", "resumes": REMOTE, "parent": "id1", "unsure_of": REMOTE},
    ),
    "an evaluation reads from a live run": (
        on_disk(REMOTE, checkpoints=[B]),
        asked("last", False, needs_folder=False),
        {"path": "b", "parent": "id1"},
    ),
    "a requeued job goes on": (
        on_disk(REQUEUED, NEW, checkpoints=[A, B]),
        asked("auto"),
        {"path": "a", "resumes": REQUEUED, "parent": "id0"},
    ),
    "a requeued job without a save": (on_disk(STOPPED, NEW, checkpoints=[B]), asked("auto"), {"resumes": STOPPED}),
    "a path to the newest": (
        on_disk(OLD, checkpoints=[A], given=A),
        asked("a"),
        {"path": "a", "resumes": OLD, "parent": "id0"},
    ),
    "a path to an older one": (
        on_disk(OLD, checkpoints=[A, saved(0, "c", "3")], given=A),
        asked("a"),
        {"path": "a", "parent": "id0"},
    ),
    "another version than the newest run's": (
        on_disk(OLD, checkpoints=[A]),
        asked("auto", version="mine"),
        {"path": "a", "parent": "id0", "version": "mine"},
    ),
    "a version that was used": (
        on_disk(owner=OLD),
        asked(None, version="version_0"),
        {"version": "version_0", "replaces": OLD},
    ),
    "a version that may be in use": (
        on_disk(owner=REMOTE),
        asked(None, version="version_1"),
        {"version": "version_1", "replaces": REMOTE, "unsure_of": REMOTE},
    ),
    "a fit after an evaluation": (
        on_disk(owner=EVALUATED),
        asked(None, last="version_0", joins_last=True),
        {"version": "version_0", "replaces": EVALUATED},
    ),
    "a fit after a fit": (on_disk(owner=OLD), asked(None, last="version_0", joins_last=True), {}),
    "a fit whose logger was used before": (on_disk(), asked(None, last="version_0"), {"version": "version_0"}),
    "an evaluation after a fit": (
        on_disk(owner=OLD),
        asked(None, False, last="version_0", joins_last=True),
        {"version": "version_0", "adds_to": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_decision_follows_from_the_disk_and_the_request(case: str) -> None:  # J-13
    found, request, expected = CASES[case]
    decision = decide(found, request)
    if "resumes" in expected:
        expected = {**expected, "version": expected["resumes"].name}
    assert {name: value for name, value in decision._asdict().items() if value not in (None, "", (), False)} == expected


def test_a_version_in_use_is_refused() -> None:  # J-13
    decision = decide(on_disk(owner=REMOTE, alive={REMOTE.folder: True}), asked("auto", version="version_1"))
    assert decision.refusal is not None
    assert decision.refusal[0].endswith("'runs/version_1' belongs to a run that is under way (process 1 on elsewhere).")
