"""Runs that save into one folder exclude each other, also on disks that lock only files open for writing: J-01."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Container
from pathlib import Path

import pytest
from checkpoint_case import written

from drivetrain.checkpoint import load, verify
from drivetrain.checkpoint._format.local_storage import claim_name

FLOCK = fcntl.flock


def _flock_of_nfs(descriptor: int, operation: int) -> None:
    """NFS implements `flock` as a byte-range lock, which requires a writable descriptor (flock(2), NFS details)."""
    read_only = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    if operation & fcntl.LOCK_EX and read_only:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    FLOCK(descriptor, operation)


def _no_flock(descriptor: int, operation: int) -> None:
    """A disk without locks, such as Lustre mounted without `flock`."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def _next_to(claimed: Container[str]) -> str:
    return next(name for name in ("c", "c-v1", "c-v2") if name not in claimed)


def test_two_runs_that_choose_at_once_choose_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # J-01
    monkeypatch.setattr(fcntl, "flock", _flock_of_nfs)
    chosen: list[tuple[str, Callable[[], None]]] = []
    second_looks = threading.Event()

    def first_choice(claimed: Container[str]) -> str:
        second.start()
        second_looks.wait(0.5)  # times out unless the second run gets the lock
        return _next_to(claimed)

    def second_choice(claimed: Container[str]) -> str:
        second_looks.set()
        return _next_to(claimed)

    second = threading.Thread(target=lambda: chosen.append(claim_name(str(tmp_path), second_choice)))
    (tmp_path / ".choosing.lock").touch()  # of a run that was killed as it chose
    chosen.append(claim_name(str(tmp_path), first_choice))
    second.join(30)
    assert sorted(name for name, _ in chosen) == ["c", "c-v1"]
    for _, give_up in chosen:
        give_up()
    assert not list(tmp_path.iterdir())


def test_without_locks_checkpoints_are_whole_and_nothing_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # J-01
    monkeypatch.setattr(fcntl, "flock", _no_flock)
    token = "0123456789abcdef"
    (tmp_path / f".saving-{token}.lock").write_text("c")
    (tmp_path / f".saving-{token}").mkdir()
    name, give_up = claim_name(str(tmp_path), _next_to)
    path = written(tmp_path / name)
    give_up()
    assert name == "c-v1"
    assert not verify(path)
    assert load(path).progress["step"] == 5
    assert sorted(os.listdir(tmp_path)) == [f".saving-{token}", f".saving-{token}.lock", "c-v1"]
