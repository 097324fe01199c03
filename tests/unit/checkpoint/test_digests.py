"""SHA-256 of every file in the manifest, so that a signature over the manifest covers all (J-11)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import fsspec
import pytest
from checkpoint_case import contents, equal, flip, resealed

from drivetrain import CheckpointError, ConfigurationError
from drivetrain._distributed.control_plane import LocalControl
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load, verify
from drivetrain.checkpoint.__main__ import main
from drivetrain.checkpoint._format import Sizes, commit, save, stage
from drivetrain.checkpoint._format.checksums import checksums_of
from drivetrain.checkpoint._format.file_writer import FileWriter


def digested(path: Path | str, sizes: Sizes | None = None) -> Path:
    """A small checkpoint with digests."""
    whole = contents()
    whole.digest = "sha256"
    options: dict[str, Any] = {} if sizes is None else {"sizes": sizes}
    save(str(path), whole, LocalControl(), **options)
    return Path(path)


def described(folder: Path) -> dict[str, Any]:
    files: dict[str, Any] = json.loads((folder / "manifest.json").read_text())["files"]
    return files


def test_every_file_has_its_own(tmp_path: Path) -> None:  # J-11
    folder = digested(tmp_path / "c", Sizes(small=10, large=40))
    files = described(folder)
    assert set(files) | {"manifest.json"} == set(os.listdir(folder))
    assert len(files) > 6  # weights in several files, their index, optimizer files, documents
    for name, one in files.items():
        assert one["sha256"] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert verify(folder) == []
    assert equal(load(folder).weights()["layer.weight"], contents().weights["layer.weight"])


def test_none_without_being_asked(tmp_path: Path) -> None:
    save(str(tmp_path / "c"), contents(), LocalControl())
    assert {tuple(one) for one in described(tmp_path / "c").values()} == {("size", "crc32")}
    assert verify(tmp_path / "c") == []


def test_a_large_file_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "file"
    pieces = [os.urandom(size) for size in (1, 2**22 - 1, 2**22, 3 * 2**20, 7)]
    with open(path, "wb", buffering=0) as stream:
        writer = FileWriter(stream, "sha256")
        for number, piece in enumerate(pieces):
            writer.write(piece, borrowed=number % 2 == 0)
        record = writer.record()
        writer.close()
    assert record.sha256 == hashlib.sha256(b"".join(pieces)).hexdigest()
    assert record.crc32 == checksums_of(b"".join(pieces)).text()


def forged(folder: Path, name: str) -> None:
    """Alter a file and adapt its size and checksums, as someone who knows the format could."""
    flip(folder / name, -1)

    def fit_for_it(document: dict[str, Any]) -> None:
        document["files"][name]["crc32"] = checksums_of((folder / name).read_bytes()).text()

    resealed(folder, fit_for_it)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer-0.safetensors", "state.json"])
def test_what_was_forged_is_named(tmp_path: Path, name: str) -> None:  # J-11
    folder = digested(tmp_path / "c")
    forged(folder, name)
    (line,) = verify(folder)
    assert line == f"{name} was altered: its checksums match, but its SHA-256 differs"


def test_what_was_damaged_is_named_by_its_blocks(tmp_path: Path) -> None:
    folder = digested(tmp_path / "c")
    flip(folder / "model.safetensors", -1)
    (line,) = verify(folder)
    assert line == "model.safetensors was altered: 1 of 1 blocks, the first at byte 0"


def test_reading_goes_by_the_checksums_alone(tmp_path: Path) -> None:
    """As documented: reading a part of a file cannot verify the digest of the whole."""
    folder = digested(tmp_path / "c")
    forged(folder, "model.safetensors")
    assert len(load(folder).weights().staged()) == 6


@pytest.mark.parametrize("wrong", ["", "x" * 64, "AB" * 32, "ab" * 31, 3, None, ["ab"]])
def test_a_digest_that_is_none_is_refused(tmp_path: Path, wrong: Any) -> None:  # J-10
    folder = digested(tmp_path / "c")
    resealed(folder, lambda document: document["files"]["model.safetensors"].update(sha256=wrong))
    with pytest.raises(CheckpointError, match=r"damaged: .*(SHA-256|digest)"):
        load(folder)


def test_one_that_is_left_out_is_missed(tmp_path: Path) -> None:
    folder = digested(tmp_path / "c")
    resealed(folder, lambda document: document["files"]["state.json"].pop("sha256"))
    with pytest.raises(CheckpointError, match=r"'state.json' have no digest, and other files have one"):
        load(folder)


def test_in_the_background_and_in_an_object_store() -> None:
    store = fsspec.filesystem("memory")
    whole = contents()
    whole.digest = "sha256"
    for _ in range(2):  # the second time over an existing checkpoint
        commit("memory://digests/c", stage(whole, 0, 1, snapshot=True), LocalControl())
    assert verify("memory://digests/c") == []
    files = load("memory://digests/c").manifest.files
    for name, record in files.items():
        assert record.sha256 == hashlib.sha256(store.cat_file(f"/digests/c/{name}")).hexdigest()
    store.rm("/digests", recursive=True)


@pytest.mark.parametrize("wrong", ["md5", "SHA256", True, 256, "", ["sha256"]])
def test_another_digest_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Checkpoint\(digest=") as caught:
        Checkpoint(digest=wrong)
    assert "'sha256'" in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"verify\(digest="):
        verify(tmp_path, digest=wrong)


def test_one_may_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # J-11
    """A signature over a manifest without digests covers only checksums."""
    folder = digested(tmp_path / "c")
    save(str(tmp_path / "without"), contents(), LocalControl())
    assert verify(folder, digest="sha256") == []
    assert verify(tmp_path / "without", digest="sha256") == ["its files have no sha256: it was written without digests"]
    assert main(["verify", "--digest", "sha256", str(folder)]) == 0
    assert main(["verify", "--digest", "sha256", str(tmp_path / "without")]) == 1
    assert main(["verify", str(tmp_path / "without")]) == 0
    assert "written without digests" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_a_signature_over_the_manifest_covers_all(tmp_path: Path) -> None:
    """As `docs/security.md` says."""

    def call(*words: str, stdin: bytes = b"") -> int:
        done = subprocess.run(["ssh-keygen", *words], cwd=tmp_path, input=stdin, capture_output=True, check=False)
        return done.returncode

    folder = digested(tmp_path / "c")
    assert call("-q", "-t", "ed25519", "-N", "", "-f", "key") == 0
    (tmp_path / "signers").write_text(f"me {(tmp_path / 'key.pub').read_text()}")
    assert call("-Y", "sign", "-f", "key", "-n", "checkpoint", "c/manifest.json") == 0
    check = ("-Y", "verify", "-f", "signers", "-I", "me", "-n", "checkpoint", "-s", "c/manifest.json.sig")
    assert call(*check, stdin=(folder / "manifest.json").read_bytes()) == 0
    assert verify(folder) == []
    forged(folder, "model.safetensors")
    # Forging the digest too invalidates the signature.
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    resealed(folder, lambda document: document["files"]["model.safetensors"].update(sha256=digest))
    assert verify(folder) == []
    assert call(*check, stdin=(folder / "manifest.json").read_bytes()) != 0
