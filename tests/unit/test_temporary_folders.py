"""The temporary folder of a killed process is removed by the next process, and nothing else is (G-02)."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drivetrain._runtime.temporary_folders import TemporaryFolder

_HOLDS = """
import os, sys
from drivetrain._runtime.temporary_folders import TemporaryFolder
scratch = TemporaryFolder()
{more}
print(scratch.path, flush=True)
sys.stdin.read()
"""

Start = Callable[..., tuple[subprocess.Popen[str], Path]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def start(place: Path) -> Iterator[Start]:
    """Start a process that has a temporary folder until its standard input is closed."""
    started = []

    def begin(more: str = "") -> tuple[subprocess.Popen[str], Path]:
        command = [sys.executable, "-c", _HOLDS.format(more=more)]
        environment = {**os.environ, "TMPDIR": str(place)}
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    yield begin
    for process in started:
        with process:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def test_only_this_user_can_access_the_folder(place: Path) -> None:
    scratch = TemporaryFolder()
    path = Path(scratch.path)
    assert path.parent == place
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (path / "file").touch()
    scratch.remove()
    scratch.remove()
    assert not list(place.iterdir())


def test_the_folder_is_removed_with_its_process(place: Path, start: Start) -> None:
    process, path = start()
    assert path.is_dir()
    process.communicate("", timeout=30)
    assert process.returncode == 0
    assert not list(place.iterdir())


def test_the_next_process_removes_only_folders_of_dead_processes(place: Path, start: Start) -> None:
    dead, left = start()
    _, living = start()
    (left / "below").mkdir()
    (left / "below" / "file").touch()
    _kill(dead)
    (place / f"drivetrain-{'0' * 16}").mkdir()  # its process was killed before it could lock the folder
    scratch = TemporaryFolder()
    assert set(place.iterdir()) == {living, Path(scratch.path)}
    scratch.remove()


def test_a_forked_copy_keeps_the_folder(place: Path, start: Start) -> None:
    copy = "if os.fork() == 0:\n    sys.stdin.read()\n    sys.exit()"
    process, path = start(copy)
    _kill(process)
    TemporaryFolder().remove()
    assert path.is_dir()
    assert process.stdin is not None
    process.stdin.close()  # the copy exits normally, with all exit handlers
    assert process.stdout is not None
    process.stdout.read()  # until both processes have closed it
    assert path.is_dir()
    TemporaryFolder().remove()
    assert not list(place.iterdir())


def test_other_folders_are_kept(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folder(path: Path, *names: str) -> Path:
        path.mkdir()
        for name in names:
            (path / name).touch()
        return path

    name = f"drivetrain-{'0' * 15}"
    kept = {
        folder(place / "drivetrain-results", ".in-use", "file"),
        folder(place / f"{name}1", "file"),
        folder(place / f"{name}2x", ".in-use"),
    }
    (folder(place / f"{name}3") / ".in-use").symlink_to(folder(tmp_path / "other", ".in-use", "file") / "file")
    (place / f"{name}4").symlink_to(tmp_path / "other")
    (place / f"{name}5").touch()
    os.mkfifo(folder(place / f"{name}6") / ".in-use")
    kept |= {place / f"{name}{number}" for number in (3, 4, 5, 6)}
    anothers = folder(place / f"{name}7", ".in-use", "file")
    user = os.getuid()
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: user + 1)
        TemporaryFolder().remove()
    assert set(place.iterdir()) == {*kept, anothers}
    TemporaryFolder().remove()
    assert set(place.iterdir()) == kept
    assert sorted(os.listdir(tmp_path / "other")) == [".in-use", "file"]
