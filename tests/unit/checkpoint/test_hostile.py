"""Hostile checkpoints: whatever the bytes, reading them ends quickly, with a value or a clear error.

`tests/faults/test_mutated_checkpoints.py` draws such checkpoints by the thousand.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_case import replace_file, resealed, save_contents, tensor_file, written

from drivetrain import CheckpointError
from drivetrain.checkpoint import load, verify
from drivetrain.checkpoint._format import Contents, Sizes
from drivetrain.checkpoint._format.tensor_file import read_header  # the one way to a file of 2**40 bytes
from newest_checkpoint import newest


def f32(shape: Any, begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def _file(document: dict[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = document["files"]["model.safetensors"]
    return record


class TestManifests:
    @pytest.mark.parametrize(
        "planted",
        [
            {"written": 1e20},
            {"written": 10**400},
            {"written": True},
            {"progress": _nested(700)},
            {"progress": {"$tensor": "x"}},
            {"hyper_parameters": _nested(300)},
            {"extra": _nested(900)},
            {"block_size": 2**40},
            {"block_size": 0},
            {"files": []},
            {"weights": "model.safetensors"},
            {"world_size": 10**15},
            {"lineage": [["run", 1, 2]]},
            {"aliases": {"a": 1}},
            {"pretrained": {"model": 1}},
            {"averages": {"callback": ["EMA"], "evaluated": True}},
            {"averages": {"callback": "EMA", "evaluated": True}},  # there is no callback of this name
            {"left_out": [3]},
            {"left_out": None},
            {"format": 10**400},
        ],
        ids=lambda planted: next(iter(planted)),
    )
    def test_a_malformed_manifest_is_refused_and_skipped_by_auto(self, tmp_path: Path, planted: dict[str, Any]) -> None:
        # J-10
        written(tmp_path / "good")
        resealed(Path(written(tmp_path / "planted")), lambda document: document.update(planted))
        if "extra" not in planted:  # an unknown key is harmless as long as it parses
            with pytest.raises(CheckpointError) as caught:
                load(tmp_path / "planted")
            assert len(str(caught.value)) < 1000
        checkpoint = newest([str(tmp_path)])
        assert checkpoint is not None
        assert checkpoint.path.endswith("good") or "extra" in planted

    @pytest.mark.parametrize(
        "change",
        [
            lambda document: _file(document).update(size=-1),
            lambda document: _file(document).update(size=2**62),
            lambda document: document.pop("ranks"),
            lambda document: document["weights"].update(tensors=["other.safetensors"]),
        ],
        ids=["negative size", "huge size", "no ranks", "unlisted file"],
    )
    def test_a_forged_manifest_is_refused(self, tmp_path: Path, change: Any) -> None:  # F-04
        resealed(Path(written(tmp_path / "c")), change)
        with pytest.raises(CheckpointError, match="is damaged"):
            load(tmp_path / "c")

    @pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "..", ".hidden", "", "manifest.json", "a\\b"])
    def test_file_names_that_point_elsewhere_are_refused(self, tmp_path: Path, name: str) -> None:  # F-04
        def rename(document: dict[str, Any]) -> None:
            document["files"][name] = document["files"].pop("model.safetensors")
            document["weights"]["tensors"] = [name]

        resealed(Path(written(tmp_path / "c")), rename)
        with pytest.raises(CheckpointError, match="is not a valid file name"):
            load(tmp_path / "c")

    @pytest.mark.parametrize("kind", ["pipe", "link", "link to itself", "directory", "device"])
    def test_a_path_that_is_no_regular_file_is_named(self, tmp_path: Path, kind: str) -> None:
        # J-10: each of these hung, or was treated as a failing storage
        for name in ("manifest.json", "state.json"):
            path = Path(written(tmp_path / name)) / name
            content = path.read_bytes()
            path.unlink()
            if kind == "pipe":
                os.mkfifo(path)
            elif kind == "link":
                (tmp_path / f"elsewhere-{name}").write_bytes(content)
                path.symlink_to(tmp_path / f"elsewhere-{name}")
            elif kind == "link to itself":
                path.symlink_to(path.name)
            elif kind == "directory":
                path.mkdir()
            else:
                path.symlink_to("/dev/zero")
            assert name in verify(tmp_path / name)[0]
            with pytest.raises(CheckpointError, match=name):
                load(tmp_path / name).state()
        checkpoint = newest([str(tmp_path)])
        assert checkpoint is not None
        assert checkpoint.path.endswith("state.json")

    def test_a_pipe_with_the_name_of_a_lock_hangs_no_save(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / f".saving-{'0' * 16}.lock")
        (tmp_path / f".saving-{'1' * 16}.lock").write_bytes(b"\xff\0../..")
        assert verify(written(tmp_path / "c")) == []


class TestTensorFiles:
    @pytest.mark.parametrize(
        ("header", "nbytes"),
        [
            pytest.param({"a": f32([2], 0, 8), "b": f32([2], 4, 12)}, 12, id="overlap"),
            pytest.param({"a": f32([2], 0, 8), "b": f32([1], 12, 16)}, 16, id="gap"),
            pytest.param({"a": f32([2], 4, 12)}, 16, id="gap at the start"),
            pytest.param({"a": f32([2], 0, 8)}, 16, id="rest"),
            pytest.param({"a": f32([2**70, 0], 0, 0), "b": f32([4], 0, 16)}, 16, id="2**70"),
            pytest.param({"a": f32([2**62, 2**62, 0], 0, 0), "b": f32([4], 0, 16)}, 16, id="strides"),
            pytest.param({"__metadata__": {"format": 3}, "b": f32([4], 0, 16)}, 16, id="metadata"),
            pytest.param({"w": f32([2], 0, 2**40)}, 8, id="end beyond the file"),
            pytest.param({"w": f32([2], -8, 0)}, 8, id="negative offset"),
            pytest.param({"w": f32([2**40, 2**40], 0, 8)}, 8, id="shape larger than its data"),
            pytest.param({"w": {**f32([2], 0, 8), "dtype": "PICKLE"}}, 8, id="dtype"),
            pytest.param({"w": f32("2", 0, 8)}, 8, id="shape of text"),
            pytest.param({"w": f32([2.0], 0, 8)}, 8, id="shape of floats"),
            pytest.param({"w": [1, 2]}, 8, id="list"),
            pytest.param([1, 2], 8, id="no object"),
        ],
    )
    def test_a_malformed_header_is_refused(self, tmp_path: Path, header: Any, nbytes: int) -> None:
        # J-10, F-04
        folder = Path(written(tmp_path / "c"))
        replace_file(folder, "state.safetensors", tensor_file(header, nbytes))
        assert any("state.safetensors is not a safetensors file" in line for line in verify(folder))
        with pytest.raises(CheckpointError, match="not a safetensors file"):
            load(folder).state()

    def test_the_length_of_a_header_is_bounded(self) -> None:
        with pytest.raises(CheckpointError, match="its header claims to have"):
            read_header("x", 2**40, lambda begin, end: (2**39).to_bytes(8, "little"))

    def test_verify_finds_a_tensor_that_no_map_can_hold(self, tmp_path: Path) -> None:
        # J-10: readers that map the file fail on it; ours copies
        save_contents(tmp_path / "c", Contents({"w": torch.zeros(2)}))
        header = {"b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "w": f32([2], 1, 9)}
        replace_file(tmp_path / "c", "model.safetensors", tensor_file(header, 9))
        (problem,) = verify(tmp_path / "c")
        assert "'w' begins at byte" in problem
        assert torch.equal(load(tmp_path / "c").weights()["w"], torch.zeros(2))

    def test_more_files_than_a_process_may_open(self, tmp_path: Path) -> None:
        weights = {f"w{number}": torch.full((100,), float(number)) for number in range(200)}
        save_contents(tmp_path / "c", Contents(weights), sizes=Sizes(large=400))
        before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
        checkpoint = load(tmp_path / "c")
        assert len(checkpoint.weights().staged()) == 200
        if before:
            assert len(os.listdir("/proc/self/fd")) < before + 70
            checkpoint.close()
            assert len(os.listdir("/proc/self/fd")) <= before


def test_a_parameter_called_metadata_is_refused_and_state_of_that_name_is_kept(tmp_path: Path) -> None:
    # J-12: the tensor was silently dropped
    with pytest.raises(CheckpointError, match="named '__metadata__'"):
        save_contents(tmp_path / "c", Contents({"__metadata__": torch.ones(1)}))
    save_contents(tmp_path / "c", Contents({}, state={"__metadata__": torch.ones(1)}))
    assert torch.equal(load(tmp_path / "c").state()["__metadata__"], torch.ones(1))
