"""Saving to a store that fails, loses replies, or has a concurrent writer. J-04, J-14."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from checkpoint_case import contents, flip, written
from safetensors.torch import load as load_bytes

from drivetrain import CheckpointError
from drivetrain._distributed.control_plane import LocalControl
from drivetrain.checkpoint import consolidate, load, verify
from drivetrain.checkpoint._format import object_storage, save
from faulty_store import FaultyStore, StoreFault

URL = "faulty://store/runs/c"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    monkeypatch.setattr(object_storage, "_PAUSES", (0.01, 0.01))
    return FaultyStore(tmp_path / "store").mount()


def scale(url: str = URL) -> float:
    return float(load(url).weights()["layer.weight"][0, 1])


def orphans(store: FaultyStore) -> list[str]:
    """Return the objects that no manifest names."""
    named = {"runs/c/manifest.json", *(f"runs/c/{name}" for name in load(URL).manifest.files)}
    return [key for key in store.objects() if key not in named]


class TestTheManifest:
    """J-04"""

    def test_an_answer_that_never_came_is_asked_after(self, store: FaultyStore) -> None:
        written(URL, 1.0)
        store.fail("put", "*/manifest.json", lost=True, times=None)
        written(URL, 2.0)
        assert (scale(), verify(URL), orphans(store)) == (2.0, [], [])

    def test_one_that_was_refused_is_put_again(self, store: FaultyStore) -> None:
        written(URL, 1.0)
        store.fail("put", "*/manifest.json", times=2)
        written(URL, 2.0)
        assert (scale(), verify(URL), orphans(store)) == (2.0, [], [])

    def test_where_it_is_refused_to_the_end_the_former_one_stays(self, store: FaultyStore) -> None:
        written(URL, 1.0)
        store.fail("put", "*/manifest.json", times=None)
        with pytest.raises(CheckpointError, match=r"may not have been written.*503 Slow Down"):
            written(URL, 2.0)
        store.heal()
        assert (scale(), verify(URL)) == (1.0, [])

    def test_where_nobody_knows_nothing_of_it_is_removed(self, store: FaultyStore) -> None:
        """The manifest is stored, the reply is lost, and reading it back fails."""
        written(URL, 1.0)
        store.fail("put", "*/manifest.json", lost=True, times=None)
        store.fail("get", "*/manifest.json", times=None)
        with pytest.raises(CheckpointError, match="may not have been written"):
            written(URL, 2.0)
        store.heal()
        assert (scale(), verify(URL)) == (2.0, [])

    def test_who_is_denied_is_told_at_once(self, store: FaultyStore) -> None:
        store.fail("put", "*/manifest.json", error=PermissionError("no right"), times=None)
        with pytest.raises(CheckpointError, match="no right"):
            written(URL)
        assert store.calls.count(("put", "runs/c/manifest.json")) == 1


class TestFiles:
    """J-04"""

    def test_a_file_whose_answer_was_lost_is_there(self, store: FaultyStore) -> None:
        store.fail("put", "*/model-*", lost=True)
        store.fail("put", "*/state-*.json", lost=True)
        written(URL)
        assert verify(URL) == []

    def test_what_a_failed_save_has_put_is_removed(self, store: FaultyStore) -> None:
        written(URL, 1.0)
        store.fail("put", "*/optimizer-*.safetensors", times=None)
        with pytest.raises(CheckpointError, match="503 Slow Down"):
            written(URL, 2.0)
        assert (scale(), verify(URL), orphans(store)) == (1.0, [], [])

    def test_a_store_that_removes_nothing_keeps_what_was_replaced(self, store: FaultyStore) -> None:
        store.fail("remove", error=PermissionError("no right"), times=None)
        for number in (1.0, 2.0):
            written(URL, number)
        assert (scale(), verify(URL)) == (2.0, [])
        assert orphans(store)


class TestTwoWriters:
    """J-04"""

    @pytest.mark.parametrize("fresh", [True, False])
    @pytest.mark.parametrize("turn", ["*/model-*", "*/manifest.json"])
    def test_they_cannot_mix(self, store: FaultyStore, fresh: bool, turn: str) -> None:
        """Another writer completes a save while this one is in progress."""
        if not fresh:
            written(URL, 1.0)
        store.fail("put", turn, error=None, call=lambda: written(URL, 3.0))
        written(URL, 2.0)
        assert scale() in (2.0, 3.0)
        assert verify(URL) == []

    def test_one_that_comes_after_keeps_its_files(self, store: FaultyStore) -> None:
        """Another writer's manifest replaces this one's before the reply to it arrives."""
        written(URL, 1.0)
        store.fail("get", "*/manifest.json", error=None, after=1, call=lambda: written(URL, 3.0))
        written(URL, 2.0)
        assert (scale(), verify(URL)) == (3.0, [])


class TestConsolidating:
    """J-14"""

    OUT = "faulty://store/out/model.safetensors"

    @pytest.fixture
    def damaged(self, tmp_path: Path) -> str:
        """Return a checkpoint of 32 MB with damage near its end, found after most of it has been read."""
        path = tmp_path / "damaged"
        weights = {f"w{number}": torch.ones(2**20) for number in range(8)}
        save(str(path), replace(contents(), weights=weights), LocalControl())
        flip(path / "model.safetensors", -5)
        return str(path)

    @pytest.mark.parametrize("url", [OUT, "memory://out/model.safetensors"])
    @pytest.mark.parametrize("there", [False, True])
    def test_a_damaged_one_leaves_nothing(self, store: FaultyStore, damaged: str, url: str, there: bool) -> None:
        filesystem, path = fsspec.core.url_to_fs(url)
        if filesystem.exists(path):
            filesystem.rm_file(path)
        if there:
            filesystem.pipe_file(path, b"what was there")
        with pytest.raises(CheckpointError, match="was altered"):
            consolidate(damaged, url, overwrite=True)
        left = [name for name in filesystem.find(path.rpartition("/")[0]) if not name.endswith("/.drivetrain-probe")]
        assert len(left) == int(there)
        assert not there or filesystem.cat_file(path) == b"what was there"

    def test_a_store_that_refuses_leaves_nothing(self, store: FaultyStore, tmp_path: Path) -> None:
        path = written(tmp_path / "c")
        store.fail("put", "out/*", times=None)
        with pytest.raises(CheckpointError, match="503 Slow Down"):
            consolidate(path, self.OUT)
        store.heal()
        assert store.objects() == []
        consolidate(path, self.OUT)
        assert store.objects() == ["out/model.safetensors"]

    def test_one_whose_answer_was_lost_is_there(self, store: FaultyStore, tmp_path: Path) -> None:
        store.fail("put", "out/*", lost=True)
        consolidate(written(tmp_path / "c"), self.OUT)
        content = (store.folder / "out" / "model.safetensors").read_bytes()
        assert load_bytes(content)["layer.weight"].shape == (2, 3)


class TestTheStore:
    """`drivetrain.testing.FaultyStore` itself."""

    def test_it_is_a_store(self, store: FaultyStore) -> None:
        filesystem, root = fsspec.core.url_to_fs("faulty://store/a")
        filesystem.pipe_file(f"{root}/b/c", b"12345")
        filesystem.pipe_file(f"{root}/d", b"")
        assert filesystem.cat_file(f"{root}/b/c", start=1, end=3) == b"23"
        assert filesystem.ls(root, detail=False) == ["store/a/b", "store/a/d"]
        assert (filesystem.size(f"{root}/b/c"), filesystem.isdir(f"{root}/b"), filesystem.exists(f"{root}/x")) == (
            5,
            True,
            False,
        )
        with filesystem.open(f"{root}/e", "wb") as stream:
            stream.write(b"all")
            assert not filesystem.exists(f"{root}/e")
        assert store.objects() == ["a/b/c", "a/d", "a/e"]
        filesystem.mv(f"{root}/e", f"{root}/f")
        filesystem.rm_file(f"{root}/d")
        with pytest.raises(FileNotFoundError):
            filesystem.cat_file(f"{root}/d")
        assert store.objects() == ["a/b/c", "a/f"]

    def test_faults(self, store: FaultyStore) -> None:
        filesystem = fsspec.filesystem("faulty")
        store.fail("put", "a/*", times=2, after=1)
        store.fail("get", error=PermissionError("no"), times=None)
        store.fail("remove", lost=True)
        for refused in (False, True, True, False):
            if refused:
                with pytest.raises(OSError, match="503"):
                    filesystem.pipe_file("store/a/b", b"x")
            else:
                filesystem.pipe_file("store/a/b", b"x")
        with pytest.raises(PermissionError):
            filesystem.cat_file("store/a/b")
        with pytest.raises(OSError, match="503"):
            filesystem.rm_file("store/a/b")
        assert store.objects() == []
        store.heal()
        filesystem.pipe_file("store/new", b"x")
        store.fail("list", error=None, age=60.0)
        assert filesystem.ls("store", detail=False) == []
        assert filesystem.ls("store", detail=False) == ["store/new"]
        assert ("list", "") in store.calls

    def test_an_operation_that_there_is_not(self) -> None:
        with pytest.raises(ValueError, match="'rename' is none of put, get"):
            StoreFault("rename")
