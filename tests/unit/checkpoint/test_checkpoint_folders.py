"""Folders of checkpoints: the newest is found by lineage, and runs that save into one exclude each other. J-01, J-03.

Their paths may begin with a tilde or contain colons (J-12).
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_case import OneLayer, quiet, save_contents

from drivetrain import Fit, callbacks
from drivetrain._format import CheckpointMetadata, CheckpointReader, StateToSave
from drivetrain._runs import start_search
from drivetrain._runs.checkpoint_folders import children, is_taken, write_latest
from drivetrain._storage.folder import StorageError
from drivetrain._storage.paths import local_path
from drivetrain._storage.publication import reserve_name
from drivetrain.checkpoint import load, verify
from drivetrain.errors import CheckpointError
from drivetrain.loggers import CSVLogger
from faulty_store import FaultyStore
from newest_checkpoint import newest

FLOCK = fcntl.flock


def written(folder: Any, name: str, *lineage: tuple[str, int], **metadata: Any) -> str:
    described = CheckpointMetadata(lineage=lineage, **metadata)
    return save_contents(f"{folder}/{name}", StateToSave({"w": torch.zeros(1)}, described, state={"a": 1}))


def found(folder: Any, **options: Any) -> str | None:
    checkpoint = newest([str(folder)], **options)
    return None if checkpoint is None else checkpoint.path.rpartition("/")[2]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_search, "_FIRST_PAUSE", 0.01)


@pytest.mark.parametrize("ahead", [0.0, 3600.0])
def test_a_descendant_is_newer_than_its_ancestors_by_any_clock(ahead: float, tmp_path: Path, monkeypatch: Any) -> None:
    # J-03
    clock = time.time
    monkeypatch.setattr("time.time", lambda: clock() + ahead)
    written(tmp_path, "step=12", ("first", 2))
    monkeypatch.setattr("time.time", clock)
    assert found(tmp_path) == "step=12"
    written(tmp_path, "step=18", ("first", 3))
    assert found(tmp_path) == "step=18"  # within one run
    written(tmp_path, "step=24", ("first", 3), ("second", 1))
    assert found(tmp_path) == "step=24"  # in a run that resumed from it


def test_between_branches_the_time_decides(tmp_path: Path) -> None:  # J-03
    written(tmp_path, "one", ("first", 2), ("second", 9))
    written(tmp_path, "other", ("first", 2), ("third", 1))
    assert found(tmp_path) == "other"
    written(tmp_path, "alone")  # written before checkpoints had a lineage
    assert found(tmp_path) == "alone"


def test_what_a_run_cannot_resume_from_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # F-05, J-10: incomplete folders and weights silently, a checkpoint with an invalid value with a warning
    written(tmp_path, "whole", ("a", 1))
    written(tmp_path, "weights", ("a", 2), weights_only=True)
    (tmp_path / "torn").mkdir()
    (tmp_path / "planted" / "manifest.json").mkdir(parents=True)
    (tmp_path / "noise").mkdir()
    (tmp_path / "noise" / "manifest.json").write_bytes(os.urandom(100))
    assert found(tmp_path) == "whole"
    assert found(tmp_path / "nothing") is None
    written(tmp_path, "newer", ("a", 2))

    def check(checkpoint: CheckpointReader) -> None:
        if checkpoint.path.endswith("newer"):
            raise CheckpointError("'epoch' in manifest.json is 'x'", "a run cannot go on from that", "take another")

    with caplog.at_level("WARNING", logger="drivetrain"):
        assert found(tmp_path, check=check) == "whole"
    assert f"Skipping checkpoint {str(tmp_path / 'newer')!r}. 'epoch' in manifest.json is 'x'" in caplog.text


@pytest.mark.parametrize(
    ("operation", "pattern"), [("get", "*/manifest.json"), ("list", "*"), ("size", "*"), ("get", "*/state*.json")]
)
def test_a_failing_storage_is_asked_again_not_taken_for_empty(operation: str, pattern: str, store: FaultyStore) -> None:
    # J-03, J-01
    written(store.url, "older", ("a", 1))
    newer = written(store.url, "newer", ("a", 2))
    store.fail(operation, pattern, times=2)
    assert found(store.url, check=CheckpointReader.state) == "newer"
    store.fail("size", times=2)
    assert is_taken(newer)
    store.fail(operation, pattern, times=None)
    with pytest.raises(StorageError, match="503 Slow Down"):
        found(store.url, check=CheckpointReader.state, retry_seconds=0.05)
    store.fail("size", times=None)
    with pytest.raises(StorageError, match="It is unknown whether"):
        is_taken(newer)


def test_the_newest_checkpoint_is_found_although_the_listing_lags(store: FaultyStore) -> None:  # J-03
    written(store.url, "older", ("a", 1))
    written(store.url, "newer", ("a", 2))
    write_latest(store.url, "newer")
    for file in (store.folder / "older").iterdir():
        os.utime(file, (1, 1))
    store.fail("list", error=None, age=60.0, times=None)
    assert children(store.url) == ["older"]
    assert found(store.url) == "newer"


@pytest.mark.parametrize("content", [b"", b"../elsewhere", b"gone", b"\xff\0", b"x" * 1000])
def test_a_file_latest_with_any_content_is_tolerated(content: bytes, store: FaultyStore) -> None:  # J-10
    written(store.url, "one", ("a", 1))
    (store.folder / "latest").write_bytes(content)
    assert found(store.url) == "one"


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


def test_two_runs_that_choose_a_name_at_once_take_turns(tmp_path: Path, monkeypatch: Any) -> None:  # J-01
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

    second = threading.Thread(target=lambda: chosen.append(reserve_name(str(tmp_path), second_choice)))
    (tmp_path / ".choosing.lock").touch()  # of a run that was killed as it chose
    chosen.append(reserve_name(str(tmp_path), first_choice))
    second.join(30)
    assert sorted(name for name, _ in chosen) == ["c", "c-v1"]
    for _, give_up in chosen:
        give_up()
    assert not list(tmp_path.iterdir())


def test_without_locks_saves_are_whole_and_nothing_is_cleared(tmp_path: Path, monkeypatch: Any) -> None:  # J-01
    monkeypatch.setattr(fcntl, "flock", _no_flock)
    token = "0123456789abcdef"
    (tmp_path / f".saving-{token}.lock").write_text("c")
    (tmp_path / f".saving-{token}").mkdir()
    name, give_up = reserve_name(str(tmp_path), _next_to)
    path = written(tmp_path, name)
    give_up()
    assert name == "c-v1"
    assert not verify(path)
    assert load(path).state() == {"a": 1}
    assert sorted(os.listdir(tmp_path)) == [f".saving-{token}", f".saving-{token}.lock", "c-v1"]


def trained(epochs: int = 1, start: str | None = None, **options: Any) -> Fit:
    trainer = quiet(max_epochs=epochs, seed=1, **options)
    trainer.fit(OneLayer(64, 64), list(torch.randn(4, 2, 64)), ckpt_path=start)
    return trainer


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder; the working directory is another one."""
    for name in ("home", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def test_a_tilde_is_the_home_folder(home: Path) -> None:  # J-12
    trainer = trained(callbacks=callbacks.Checkpoint("~/kept"), logger=CSVLogger("~/logs"), log_every_n_steps=1)
    trainer.save_checkpoint("~/by-hand", weights_only=True)
    trained(callbacks=callbacks.Checkpoint(), default_root_dir="~/root")
    assert list(Path().iterdir()) == []
    assert verify("~/by-hand") == []
    assert (home / "kept/epoch=0-step=4/manifest.json").exists()
    assert (home / "root/drivetrain_logs/version_0/checkpoints/epoch=0-step=4/manifest.json").exists()
    assert len(list((home / "logs").rglob("metrics.csv"))) == 1
    assert trained(2, "~/kept/epoch=0-step=4", callbacks=callbacks.Checkpoint("~/kept")).global_step == 8


@pytest.mark.usefixtures("home")
def test_a_name_with_colons_is_a_folder_and_a_resumed_run_closes_the_files_that_it_read() -> None:  # J-12
    held: list[str] = []

    class OpenFiles(callbacks.Checkpoint):
        def on_train_end(self, trainer: object, module: object) -> None:
            held.extend(Path("/proc/self/maps").read_text().splitlines())
            held.extend(os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink())

    trained(callbacks=callbacks.Checkpoint("exp::1"))
    assert load("exp::1/epoch=0-step=4").progress["epoch"] == 1
    assert local_path("simplecache::memory://bucket/run") is None
    trained(2, "exp::1/epoch=0-step=4", callbacks=OpenFiles("exp::1"))
    assert held
    assert not [line for line in held if "epoch=0-step=4" in line]
