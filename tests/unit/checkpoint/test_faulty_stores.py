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
from faulty_store import FaultyStore

URL, OUT = "faulty://store/runs/c", "faulty://store/out/model.safetensors"
MANIFEST = "*/manifest.json"
NO_RIGHT = PermissionError("no right")
ALWAYS: dict[str, Any] = {"times": None}


def scale() -> float:
    """Return the value that tells the checkpoints of `written` apart."""
    return float(load(URL).weights()["layer.weight"][0, 1])


def orphans(store: FaultyStore) -> list[str]:
    """Return the objects that no manifest names."""
    named = {"runs/c/manifest.json", *(f"runs/c/{name}" for name in load(URL).manifest.files)}
    return [key for key in store.objects() if key not in named]


@pytest.mark.parametrize(
    ("operation", "pattern", "fault"),
    [
        pytest.param("put", MANIFEST, {"lost": True, **ALWAYS}, id="replies about the manifest are lost"),
        pytest.param("put", MANIFEST, {"times": 2}, id="the manifest is refused twice"),
        pytest.param("put", "*/model-*", {"lost": True}, id="a reply about weights is lost"),
        pytest.param("put", "*/state-*.json", {"lost": True}, id="a reply about a document is lost"),
        pytest.param("remove", "*", {"error": NO_RIGHT, **ALWAYS}, id="nothing may be removed"),
    ],
)
def test_a_save_outlasts_a_fault(store: FaultyStore, operation: str, pattern: str, fault: Any) -> None:  # J-04
    written(URL, 1.0)
    store.fail(operation, pattern, **fault)
    written(URL, 2.0)
    assert (scale(), verify(URL)) == (2.0, [])
    assert bool(orphans(store)) == (operation == "remove")


@pytest.mark.parametrize(
    ("pattern", "fault", "message", "left"),
    [
        pytest.param(MANIFEST, ALWAYS, r"may not have been written.*503 Slow Down", 1.0, id="the manifest is refused"),
        pytest.param(MANIFEST, {"lost": True, **ALWAYS}, "may not have been written", 2.0, id="no reply ever comes"),
        pytest.param("*/optimizer-*.safetensors", ALWAYS, "503 Slow Down", 1.0, id="a file is refused"),
        pytest.param(MANIFEST, {"error": NO_RIGHT, **ALWAYS}, "no right", 1.0, id="a permission is missing"),
    ],
)
def test_a_failed_save_leaves_a_checkpoint(store: Any, pattern: str, fault: Any, message: str, left: float) -> None:
    # J-04
    written(URL, 1.0)
    store.calls.clear()
    store.fail("put", pattern, **fault)
    if "lost" in fault:  # so that it stays unknown whether the manifest was stored
        store.fail("get", MANIFEST, **ALWAYS)
    with pytest.raises(CheckpointError, match=message):
        written(URL, 2.0)
    store.heal()
    assert (scale(), verify(URL)) == (left, [])
    assert bool(orphans(store)) == (pattern == MANIFEST)  # once the manifest may be out, nothing of it is removed
    if "error" in fault:  # without a second attempt
        assert store.calls.count(("put", "runs/c/manifest.json")) == 1


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("turn", ["*/model-*", MANIFEST])
def test_a_save_within_another_does_not_mix_their_files(store: FaultyStore, exists: bool, turn: str) -> None:  # J-04
    if exists:
        written(URL, 1.0)
    store.fail("put", turn, error=None, call=lambda: written(URL, 3.0))
    written(URL, 2.0)
    assert scale() in (2.0, 3.0)
    assert verify(URL) == []


def test_a_writer_whose_manifest_replaces_another_keeps_its_files(store: FaultyStore) -> None:
    # J-04: it comes before the reply to the first one's manifest
    written(URL, 1.0)
    store.fail("get", MANIFEST, error=None, after=1, call=lambda: written(URL, 3.0))
    written(URL, 2.0)
    assert (scale(), verify(URL)) == (3.0, [])


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("url", [OUT, "memory://out/model.safetensors", "out/model.safetensors"])
def test_consolidating_a_damaged_checkpoint_changes_nothing(tmp_path: Path, url: str, monkeypatch: Any) -> None:
    # J-14: 32 MB with damage near the end, found after most of it has been read
    monkeypatch.chdir(tmp_path)
    weights = {f"w{number}": torch.ones(2**20) for number in range(8)}
    save_contents(tmp_path / "damaged", replace(contents(), weights=weights))
    flip(tmp_path / "damaged" / "model.safetensors", -5)
    filesystem, path = fsspec.core.url_to_fs(url)
    for existing in ([], [b"existing"]):
        for content in existing:
            filesystem.pipe_file(path, content)
        with pytest.raises(CheckpointError, match="was altered"):
            consolidate(tmp_path / "damaged", url, overwrite=True)
        found = [name for name in filesystem.find(path.rpartition("/")[0]) if not name.endswith("/.drivetrain-probe")]
        assert [filesystem.cat_file(name) for name in found] == existing
    filesystem.rm_file(path)


def test_consolidating_into_a_failing_store_leaves_nothing_or_all(store: FaultyStore, tmp_path: Path) -> None:  # J-14
    path = written(tmp_path / "c")
    store.fail("put", "out/*", **ALWAYS)
    with pytest.raises(CheckpointError, match="503 Slow Down"):
        consolidate(path, OUT)
    store.heal()
    assert store.objects() == []
    store.fail("put", "out/*", lost=True)
    consolidate(path, OUT)
    assert store.objects() == ["out/model.safetensors"]
    content = (store.folder / "out" / "model.safetensors").read_bytes()
    assert load_bytes(content)["layer.weight"].shape == (2, 3)
