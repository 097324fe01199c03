"""Pickles that an attacker puts into the store are not loaded, and only this user can write error files. J-06."""

from __future__ import annotations

import base64
import json
import os
import pickle
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from drivetrain._distributed.control_group import GroupControl
from drivetrain._distributed.failure import Failure
from drivetrain.environments import Placement
from drivetrain.launchers._processes import FAILURES_PREFIX, Processes
from drivetrain.launchers.world import World


class _Planted:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def _plant(trace: Path, rank: int = 1) -> str:
    pickled = base64.b85encode(pickle.dumps(_Planted(trace))).decode()
    failure = Failure(rank, error_type="ValueError", message="planted", pickled_error=pickled)
    assert failure.load_error() is None  # a folder is no exception,
    trace.rmdir()  # but it shows that unpickling works
    return json.dumps(asdict(failure))


def _through_the_control_plane(planted: str) -> Failure | None:
    store = HashStore()
    store.add("failures", 1)
    store.set("failure/1", planted)
    return GroupControl(None, store, 0, 2).first_failure()


def _through_the_launcher(planted: str) -> Failure | None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set(f"{FAILURES_PREFIX}/first", planted)
    (failure,) = World("function", Placement(0, 2, 0, 2), "127.0.0.1", store.port, store=store).failures()
    return failure


def _through_the_callers_store(planted: str) -> Failure | None:
    processes = Processes.of_script(1, ["/bin/false"], [{}])
    processes.store = HashStore()
    processes.store.set(f"{FAILURES_PREFIX}/1", planted)
    assert processes.wait(20)
    (failure,) = processes.failures()
    processes.end()
    return failure


@pytest.mark.parametrize("way", [_through_the_control_plane, _through_the_launcher, _through_the_callers_store])
def test_a_pickle_in_the_store_is_not_opened(way: Any, tmp_path: Path) -> None:  # J-06
    failure = way(_plant(tmp_path / "trace"))
    assert failure is not None
    assert (failure.message, failure.load_error()) == ("planted", None)
    assert not (tmp_path / "trace").exists()


def test_a_failure_goes_into_the_store_as_text() -> None:  # J-06
    failure = Failure.of_exception(1, ValueError("text"))
    assert isinstance(failure.load_error(), ValueError)
    again = Failure.decode(failure.encode())
    assert (again.error_type, again.message, again.traceback) == ("ValueError", "text", failure.traceback)
    assert again.load_error() is None


def test_error_files_are_writable_only_for_this_user() -> None:  # J-06
    processes = Processes.of_script(1, ["/bin/sleep", "60"], [{}])
    try:
        folder = Path(processes._scratch.name)
        assert folder in Path(processes.error_file(1)).parents
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()
    finally:
        processes.end(kill=True)
