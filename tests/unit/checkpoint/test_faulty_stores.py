"""Saving to a store that fails, loses replies, or has a concurrent writer. J-04, J-14."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from checkpoint_case import contents, flip, save_contents, written
from safetensors.torch import load as load_bytes

from drivetrain import CheckpointError
from drivetrain.checkpoint import consolidate, load, verify
from drivetrain.checkpoint._format import object_storage
from faulty_store import FaultyStore

URL = "faulty://store/runs/c"
MANIFEST = "*/manifest.json"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    monkeypatch.setattr(object_storage, "_PAUSES", (0.01, 0.01))
    return FaultyStore(tmp_path / "store").mount()


def scale() -> float:
    """Return the value that tells the checkpoints of `written` apart."""
    return float(load(URL).weights()["layer.weight"][0, 1])


def orphans(store: FaultyStore) -> list[str]:
    """Return the objects that no manifest names."""
    named = {"runs/c/manifest.json", *(f"runs/c/{name}" for name in load(URL).manifest.files)}
    return [key for key in store.objects() if key not in named]


class TestSaving:
    """J-04"""

    @pytest.mark.parametrize(
        ("pattern", "fault"),
        [
            pytest.param(MANIFEST, {"lost": True, "times": None}, id="replies about the manifest are lost"),
            pytest.param(MANIFEST, {"times": 2}, id="the manifest is refused twice"),
            pytest.param("*/model-*", {"lost": True}, id="a reply about weights is lost"),
            pytest.param("*/state-*.json", {"lost": True}, id="a reply about a document is lost"),
        ],
    )
    def test_a_save_outlasts_a_fault(self, store: FaultyStore, pattern: str, fault: dict[str, Any]) -> None:
        written(URL, 1.0)
        store.fail("put", pattern, **fault)
        written(URL, 2.0)
        assert (scale(), verify(URL), orphans(store)) == (2.0, [], [])

    def test_a_refused_manifest_leaves_the_previous_checkpoint(self, store: FaultyStore) -> None:
        written(URL, 1.0)
        store.fail("put", MANIFEST, times=None)
        with pytest.raises(CheckpointError, match=r"may not have been written.*503 Slow Down"):
            written(URL, 2.0)
        store.heal()
        assert (scale(), verify(URL)) == (1.0, [])

    def test_nothing_is_removed_while_it_is_unknown_whether_the_manifest_was_stored(self, store: FaultyStore) -> None:
        written(URL, 1.0)
        store.fail("put", MANIFEST, lost=True, times=None)
        store.fail("get", MANIFEST, times=None)
        with pytest.raises(CheckpointError, match="may not have been written"):
            written(URL, 2.0)
        store.heal()
        assert (scale(), verify(URL)) == (2.0, [])

    def test_a_missing_permission_is_reported_without_a_second_attempt(self, store: FaultyStore) -> None:
        store.fail("put", MANIFEST, error=PermissionError("no right"), times=None)
        with pytest.raises(CheckpointError, match="no right"):
            written(URL)
        assert store.calls.count(("put", "runs/c/manifest.json")) == 1

    def test_the_files_of_a_failed_save_are_removed(self, store: FaultyStore) -> None:
        written(URL, 1.0)
        store.fail("put", "*/optimizer-*.safetensors", times=None)
        with pytest.raises(CheckpointError, match="503 Slow Down"):
            written(URL, 2.0)
        assert (scale(), verify(URL), orphans(store)) == (1.0, [], [])

    def test_a_store_that_removes_nothing_keeps_the_replaced_files(self, store: FaultyStore) -> None:
        store.fail("remove", error=PermissionError("no right"), times=None)
        for number in (1.0, 2.0):
            written(URL, number)
        assert (scale(), verify(URL)) == (2.0, [])
        assert orphans(store)


class TestTwoWriters:
    """J-04"""

    @pytest.mark.parametrize("exists", [True, False])
    @pytest.mark.parametrize("turn", ["*/model-*", MANIFEST])
    def test_a_save_within_another_does_not_mix_their_files(self, store: FaultyStore, exists: bool, turn: str) -> None:
        if exists:
            written(URL, 1.0)
        store.fail("put", turn, error=None, call=lambda: written(URL, 3.0))
        written(URL, 2.0)
        assert scale() in (2.0, 3.0)
        assert verify(URL) == []

    def test_a_later_writer_keeps_its_files(self, store: FaultyStore) -> None:
        """Another writer's manifest replaces this one's before the reply to it arrives."""
        written(URL, 1.0)
        store.fail("get", MANIFEST, error=None, after=1, call=lambda: written(URL, 3.0))
        written(URL, 2.0)
        assert (scale(), verify(URL)) == (3.0, [])


class TestConsolidating:
    """J-14"""

    OUT = "faulty://store/out/model.safetensors"

    @pytest.mark.parametrize("url", [OUT, "memory://out/model.safetensors"])
    @pytest.mark.parametrize("exists", [False, True])
    def test_a_damaged_checkpoint_changes_nothing(
        self, store: FaultyStore, tmp_path: Path, url: str, exists: bool
    ) -> None:
        # 32 MB with damage near the end, found after most of it has been read
        weights = {f"w{number}": torch.ones(2**20) for number in range(8)}
        save_contents(tmp_path / "damaged", replace(contents(), weights=weights))
        flip(tmp_path / "damaged" / "model.safetensors", -5)
        filesystem, path = fsspec.core.url_to_fs(url)
        if filesystem.exists(path):
            filesystem.rm_file(path)
        if exists:
            filesystem.pipe_file(path, b"existing")
        with pytest.raises(CheckpointError, match="was altered"):
            consolidate(tmp_path / "damaged", url, overwrite=True)
        left = [name for name in filesystem.find(path.rpartition("/")[0]) if not name.endswith("/.drivetrain-probe")]
        assert len(left) == int(exists)
        assert not exists or filesystem.cat_file(path) == b"existing"

    def test_a_refusing_store_is_left_empty_and_a_lost_reply_is_no_failure(
        self, store: FaultyStore, tmp_path: Path
    ) -> None:
        path = written(tmp_path / "c")
        store.fail("put", "out/*", times=None)
        with pytest.raises(CheckpointError, match="503 Slow Down"):
            consolidate(path, self.OUT)
        store.heal()
        assert store.objects() == []
        store.fail("put", "out/*", lost=True)
        consolidate(path, self.OUT)
        assert store.objects() == ["out/model.safetensors"]
        content = (store.folder / "out" / "model.safetensors").read_bytes()
        assert load_bytes(content)["layer.weight"].shape == (2, 3)
