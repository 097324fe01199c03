"""SHA-256 of every file in the manifest, so that a signature over the manifest covers all. J-11."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from checkpoint_case import contents, equal, flip, replace_file, resealed, save_contents, written

from drivetrain import CheckpointError, ConfigurationError
from drivetrain._distributed.control_plane import LocalControl
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load, verify
from drivetrain.checkpoint.__main__ import main
from drivetrain.checkpoint._format import Sizes, commit, stage

WITH_DIGESTS = replace(contents(), digest="sha256")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small checkpoint with digests."""
    return Path(save_contents(tmp_path / "c", WITH_DIGESTS))


def test_every_file_on_a_disk_and_in_a_store_has_its_digest(tmp_path: Path) -> None:  # J-11
    folder, store = tmp_path / "c", fsspec.filesystem("memory")
    save_contents(folder, WITH_DIGESTS, sizes=Sizes(small=10, large=40))
    files = load(folder).manifest.files
    assert set(files) | {"manifest.json"} == set(os.listdir(folder))
    assert len(files) > 6  # weights in several files, their index, optimizer files, documents
    for name, one in files.items():
        assert one.sha256 == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert verify(folder) == []
    assert equal(load(folder).weights()["layer.weight"], contents().weights["layer.weight"])
    for _ in range(2):  # the second time over an existing checkpoint
        commit("memory://digests/c", stage(WITH_DIGESTS, 0, 1, snapshot=True), LocalControl())
    assert verify("memory://digests/c") == []
    for name, one in load("memory://digests/c").manifest.files.items():
        assert one.sha256 == hashlib.sha256(store.cat_file(f"/digests/c/{name}")).hexdigest()
    store.rm("/digests", recursive=True)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_verify_tells_a_forged_file_from_a_damaged_one(folder: Path, name: str) -> None:  # J-11
    flip(folder / name, -1)
    assert verify(folder) == [f"{name} was altered: 1 of 1 blocks, the first at byte 0"]
    replace_file(folder, name, (folder / name).read_bytes())
    assert verify(folder) == [f"{name} was altered: its checksums match, but its SHA-256 differs"]
    # As documented, reading goes by the checksums: a part of a file cannot verify the digest of the whole.
    assert len(load(folder).weights().staged()) == 6


@pytest.mark.parametrize("wrong", ["", "AB" * 32, "ab" * 31, 3, None])
def test_a_malformed_or_missing_digest_is_refused(folder: Path, wrong: Any) -> None:  # J-10
    resealed(folder, lambda document: document["files"]["model.safetensors"].update(sha256=wrong))
    with pytest.raises(CheckpointError, match=r"damaged: .*(SHA-256|digest)"):
        load(folder)
    resealed(folder, lambda document: document["files"]["model.safetensors"].pop("sha256"))
    with pytest.raises(CheckpointError, match=r"'model.safetensors' have no digest, and other files have one"):
        load(folder)


@pytest.mark.parametrize("wrong", ["md5", True, ["sha256"]])
def test_an_unknown_digest_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)Checkpoint\(digest=.*'sha256'"):
        Checkpoint(digest=wrong)
    with pytest.raises(ConfigurationError, match=r"verify\(digest="):
        verify(tmp_path, digest=wrong)


def test_verify_can_require_digests(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # J-11: a signature over a manifest without digests covers only checksums
    without = written(tmp_path / "without")
    assert verify(folder, digest="sha256") == []
    assert verify(without, digest="sha256") == ["its files have no sha256: it was written without digests"]
    commands = (["--digest", "sha256", str(folder)], ["--digest", "sha256", without], [without])
    assert [main(["verify", *command]) for command in commands] == [0, 1, 0]
    assert "written without digests" in capsys.readouterr().out
