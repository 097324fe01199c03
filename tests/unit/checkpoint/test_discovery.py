"""The newest checkpoint is found by lineage, not only by clocks; a failing storage does not count as an empty one."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from drivetrain._distributed.control_plane import LocalControl
from drivetrain.checkpoint import _discovery as finding
from drivetrain.checkpoint._folders import children, is_taken, write_latest
from drivetrain.checkpoint._format import Checkpoint, CheckpointMetadata, Contents, StorageError, save
from drivetrain.errors import CheckpointError
from faulty_store import FaultyStore
from newest_checkpoint import newest


def written(folder: Any, name: str, lineage: list[tuple[str, int]], **metadata: Any) -> str:
    path = f"{folder}/{name}"
    save(path, Contents({"w": torch.zeros(1)}, CheckpointMetadata(lineage=tuple(lineage), **metadata)), LocalControl())
    return path


def found(folder: Any, **options: Any) -> str | None:
    checkpoint = newest([str(folder)], **options)
    return None if checkpoint is None else checkpoint.path.rpartition("/")[2]


@pytest.mark.parametrize("ahead", [0.0, 3600.0])
def test_a_descendant_is_newer_than_its_ancestors_whatever_the_clocks_say(
    ahead: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # J-03: with one clock an hour ahead, each restart resumed from step 12
    clock = time.time
    monkeypatch.setattr("time.time", lambda: clock() + ahead)
    written(tmp_path, "step=12", [("first", 2)])
    monkeypatch.setattr("time.time", clock)
    assert found(tmp_path) == "step=12"
    written(tmp_path, "step=18", [("first", 3)])
    assert found(tmp_path) == "step=18"  # within one run
    written(tmp_path, "step=24", [("first", 3), ("second", 1)])
    assert found(tmp_path) == "step=24"  # in a run that resumed from it
    written(tmp_path, "step=30", [("first", 3), ("second", 1), ("third", 4)])
    assert found(tmp_path) == "step=30"


def test_between_branches_the_time_decides(tmp_path: Path) -> None:
    # J-03
    written(tmp_path, "one", [("first", 2), ("second", 9)])
    written(tmp_path, "other", [("first", 2), ("third", 1)])
    assert found(tmp_path) == "other"
    written(tmp_path, "alone", [])  # written before checkpoints had a lineage
    assert found(tmp_path) == "alone"


@pytest.mark.parametrize(
    ("one", "other", "descends"),
    [
        ([("a", 3)], [("a", 2)], True),
        ([("a", 2)], [("a", 2)], False),
        ([("a", 2)], [("a", 3)], False),
        ([("a", 2), ("b", 1)], [("a", 2)], True),
        ([("a", 2), ("b", 1)], [("a", 3)], False),  # another branch
        ([("a", 2), ("b", 1), ("c", 1)], [("a", 2)], True),
        ([("a", 2), ("c", 1)], [("a", 2), ("b", 1)], False),
        ([("a", 2)], [], False),
        ([], [("a", 2)], False),
    ],
)
def test_descent(one: Any, other: Any, descends: bool) -> None:
    assert CheckpointMetadata(lineage=tuple(one)).descends_from(CheckpointMetadata(lineage=tuple(other))) is descends


def test_what_is_torn_or_of_another_kind_is_passed_over(tmp_path: Path) -> None:
    # F-05
    written(tmp_path, "whole", [("a", 1)])
    written(tmp_path, "weights", [("a", 2)], weights_only=True)
    (tmp_path / "torn").mkdir()
    (tmp_path / "planted" / "manifest.json").mkdir(parents=True)
    (tmp_path / "noise").mkdir()
    (tmp_path / "noise" / "manifest.json").write_bytes(os.urandom(100))
    assert found(tmp_path) == "whole"
    assert found(tmp_path / "nothing") is None


class Flaky:
    """Makes a memory file system fail the first calls of a method, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, times: float) -> None:
        self.asked = 0
        kind = type(fsspec.filesystem("memory"))
        plain = getattr(kind, method)

        def refuse(filesystem: Any, path: str, *args: Any, **options: Any) -> Any:
            if "flaky" in path and (method != "cat_file" or path.endswith("manifest.json")):
                self.asked += 1
                if self.asked <= times:
                    raise OSError("503 Slow Down")
            return plain(filesystem, path, *args, **options)

        monkeypatch.setattr(kind, method, refuse)


@pytest.mark.parametrize("method", ["cat_file", "ls", "info"])
def test_a_storage_that_refuses_is_asked_again(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # J-03: after one 503 the run resumed from an older checkpoint
    monkeypatch.setattr(finding, "_FIRST_PAUSE", 0.01)
    folder = f"memory://flaky-{method}"
    written(folder, "older", [("a", 1)])
    written(folder, "newer", [("a", 2)])
    flaky = Flaky(monkeypatch, method, times=2)
    assert found(folder) == "newer"
    assert flaky.asked > 2


@pytest.mark.parametrize("method", ["cat_file", "ls", "info"])
def test_a_storage_that_goes_on_refusing_is_an_error(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # J-03: when all requests failed, the run started from scratch
    monkeypatch.setattr(finding, "_FIRST_PAUSE", 0.01)
    folder = f"memory://flaky-always-{method}"
    written(folder, "one", [("a", 1)])
    flaky = Flaky(monkeypatch, method, times=float("inf"))
    with pytest.raises(StorageError, match="503 Slow Down"):
        found(folder, retry_seconds=0.05)
    assert flaky.asked >= 3


def test_a_listing_that_lags_behind(tmp_path: Path) -> None:
    # J-03: the newest checkpoint is found by name, although the listing lags
    store = FaultyStore(tmp_path).mount()
    written(store.url, "older", [("a", 1)])
    written(store.url, "newer", [("a", 2)])
    write_latest(store.url, "newer")
    os.utime(store.folder / "older" / "manifest.json", (1, 1))
    for name in os.listdir(store.folder / "older"):
        os.utime(store.folder / "older" / name, (1, 1))
    store.fail("list", error=None, age=60.0, times=None)
    assert children(store.url) == ["older"]
    assert found(store.url) == "newer"


@pytest.mark.parametrize("content", [b"", b"../elsewhere", b"gone", b"\xff\0", b"x" * 1000])
def test_what_latest_says_may_be_anything(content: bytes, tmp_path: Path) -> None:
    # J-10
    store = FaultyStore(tmp_path / "store").mount()
    written(store.url, "one", [("a", 1)])
    (store.folder / "latest").write_bytes(content)
    assert found(store.url) == "one"


def test_whether_a_name_is_taken_is_asked_again_and_never_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # J-01: fsspec's `exists` returns False on errors, so an existing checkpoint was overwritten
    monkeypatch.setattr("drivetrain.checkpoint._folders._RETRY_PAUSES", (0.01, 0.01))
    store = FaultyStore(tmp_path).mount()
    written(store.url, "one", [("a", 1)])
    store.fail("size", times=2)
    assert is_taken(f"{store.url}/one")
    store.fail("size", times=None)
    with pytest.raises(StorageError, match="It is unknown whether"):
        is_taken(f"{store.url}/one")


def test_what_no_run_can_go_on_from_is_passed_over_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # J-10: one invalid checkpoint does not break "auto"
    written(tmp_path, "older", [("a", 1)])
    written(tmp_path, "newer", [("a", 2)])

    def check(checkpoint: Checkpoint) -> None:
        if checkpoint.path.endswith("newer"):
            raise CheckpointError("'epoch' in manifest.json is 'x'", "a run cannot go on from that", "take another")

    with caplog.at_level("WARNING", logger="drivetrain"):
        chosen = newest([str(tmp_path)], check=check)
    assert chosen is not None
    assert chosen.path.endswith("older")
    assert f"Skipping checkpoint {str(tmp_path / 'newer')!r}. 'epoch' in manifest.json is 'x'" in caplog.text


def test_a_storage_that_refuses_a_document_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # J-03: the stored checkpoint may be intact
    monkeypatch.setattr(finding, "_FIRST_PAUSE", 0.01)
    folder = "memory://flaky-document"
    written(folder, "older", [("a", 1)])
    written(folder, "newer", [("a", 2)])
    asked: list[str] = []

    def check(checkpoint: Checkpoint) -> None:
        asked.append(checkpoint.path)
        if len(asked) < 3:
            raise StorageError("503 Slow Down", "the storage refuses", "try again")

    chosen = newest([folder], check=check)
    assert chosen is not None
    assert chosen.path.endswith("newer")
    assert len(asked) == 3
