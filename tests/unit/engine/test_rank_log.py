"""A rank's log: its location, and that its errors do not fail the run: G-01."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

# Private: a run would have to log 16 MiB, and to lose its folder.
from drivetrain._engine.rank_log import MAX_LOG_BYTES, RankLog
from drivetrain._engine.run_folder import RunFolder


def _log(path: Path | str | None, world_size: int = 2) -> RankLog:
    folder = RunFolder()
    folder.path = None if path is None else str(path)
    return RankLog(folder, 1, world_size)


def test_a_log_is_in_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _log(tmp_path / "run").folder == str(tmp_path / "run" / "logs")
    assert _log("run").folder == str(tmp_path / "run" / "logs")
    assert _log(None).folder is None  # a run without files
    assert _log("memory://bucket/runs/a").folder is None
    assert _log(tmp_path / "run", world_size=1).folder is None
    assert RankLog(RunFolder(), 1, 2, fallback="root").folder == str(tmp_path / "root" / "logs")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_log_does_not_fail_the_run(tmp_path: Path) -> None:
    first, second = ValueError("first"), ValueError("second")
    _log(tmp_path).add_failure(first, "the traceback")
    path = tmp_path / "logs" / "rank-1.log"
    assert path.read_text().endswith("rank 1: The run failed.\nthe traceback\n")
    assert first.__notes__ == [f"Log: {path}"]
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("a file in the folder's place")
    log = _log(tmp_path)
    log.add_failure(second, "the traceback")
    assert not hasattr(second, "__notes__")
    assert pickle.loads(pickle.dumps(log)).folder == log.folder  # it is sent with the Fit that has run


def test_a_log_is_bounded_and_keeps_the_newest_records(tmp_path: Path) -> None:
    log = _log(tmp_path)
    text = "é" * 2**19
    count = 3 * MAX_LOG_BYTES // len(text.encode())
    for number in range(count):
        log.add(f"record {number} {text}")
    log.add_failure(ValueError("last"), "the traceback")
    newest, before = (tmp_path / "logs" / name for name in ("rank-1.log", "rank-1.1.log"))
    assert sorted(newest.parent.iterdir()) == sorted([newest, before])
    assert MAX_LOG_BYTES // 2 < before.stat().st_size <= MAX_LOG_BYTES
    assert newest.stat().st_size <= MAX_LOG_BYTES
    found = (before.read_text() + newest.read_text()).splitlines()
    kept = [int(words[1]) for line in found if (words := line.partition("rank 1: ")[2].split())[:1] == ["record"]]
    assert kept == list(range(kept[0], count))
    assert "rank 1: The run failed.\nthe traceback\n" in newest.read_text()
    # What another run has written to the file counts towards its size.
    with newest.open("ab") as file:
        file.truncate(MAX_LOG_BYTES)
    _log(tmp_path).add("a run that goes on")
    assert newest.read_text().endswith("rank 1: a run that goes on\n")
    assert newest.stat().st_size < 200
    assert before.stat().st_size == MAX_LOG_BYTES
