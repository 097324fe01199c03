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
from drivetrain._format import StateToSave, tensor_writer
from drivetrain._format.tensor_file import read_header  # the one way to a file of 2**40 bytes
from drivetrain.checkpoint import load, verify
from drivetrain.testing import requires_linux
from newest_checkpoint import newest


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def newest_name(folder: Path) -> str:
    """Return the name of the checkpoint that "auto" chooses."""
    checkpoint = newest([str(folder)])
    assert checkpoint is not None
    return Path(checkpoint.path).name


PLANTED: dict[str, tuple[Any, ...]] = {
    "written": (1e20, 10**400, True),
    "progress": (_nested(700), {"$tensor": "x"}),
    "hyper_parameters": (_nested(300),),
    "block_size": (2**40, 0),
    "files": ([],),
    "files/model.safetensors/size": (-1, 2**62),
    "weights": ("model.safetensors",),
    "weights/tensors": (["other.safetensors"],),
    "ranks": (None,),
    "world_size": (10**15,),
    "lineage": ([["run", 1, 2]],),
    "aliases": ({"a": 1},),
    "pretrained": ({"model": 1},),
    "averages": ({"callback": ["EMA"], "evaluated": True}, {"callback": "unknown", "evaluated": True}),
    "left_out": ([3], None),
    "format": (10**400,),
}
"""Values that a manifest cannot have, by the place where they are planted."""


@pytest.mark.parametrize("place", PLANTED)
def test_a_malformed_manifest_is_refused_and_skipped_by_auto(tmp_path: Path, place: str) -> None:  # J-10, F-04
    *above, key = place.split("/")
    written(tmp_path / "good")
    for value in PLANTED[place]:

        def plant(document: dict[str, Any], value: Any = value) -> None:
            for name in above:
                document = document[name]
            document[key] = value

        resealed(Path(written(tmp_path / "planted")), plant)
        with pytest.raises(CheckpointError, match="is damaged" if place != "format" else "format 10000") as caught:
            load(tmp_path / "planted")
        assert len(str(caught.value)) < 1000
        assert newest_name(tmp_path) == "good"


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "..", ".hidden", "", "manifest.json", "a\\b"])
def test_file_names_that_point_elsewhere_are_refused(tmp_path: Path, name: str) -> None:  # F-04
    def rename(document: dict[str, Any]) -> None:
        document["files"][name] = document["files"].pop("model.safetensors")
        document["weights"]["tensors"] = [name]

    resealed(Path(written(tmp_path / "c")), rename)
    with pytest.raises(CheckpointError, match="is not a valid file name"):
        load(tmp_path / "c")


@pytest.mark.parametrize("kind", ["pipe", "directory", "link", "link to itself", "link to a device"])
def test_a_path_that_is_no_regular_file_is_named(tmp_path: Path, kind: str) -> None:  # J-10
    for name in ("manifest.json", "state.json"):
        path = Path(written(tmp_path / name)) / name
        elsewhere = path.rename(tmp_path / f"elsewhere-{name}")
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        else:
            targets = {"link": str(elsewhere), "link to itself": path.name, "link to a device": "/dev/zero"}
            path.symlink_to(targets[kind])
        assert name in verify(tmp_path / name)[0]
        with pytest.raises(CheckpointError, match=name):
            load(tmp_path / name).state()
    assert newest_name(tmp_path) == "state.json"


def test_a_pipe_with_the_name_of_a_lock_hangs_no_save(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f".saving-{'0' * 16}.lock")
    (tmp_path / f".saving-{'1' * 16}.lock").write_bytes(b"\xff\0../..")
    assert verify(written(tmp_path / "c")) == []


def f32(shape: Any, begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


HEADERS: dict[str, tuple[Any, int]] = {
    "overlap": ({"a": f32([2], 0, 8), "b": f32([2], 4, 12)}, 12),
    "gap": ({"a": f32([2], 0, 8), "b": f32([1], 12, 16)}, 16),
    "gap at the start": ({"a": f32([2], 4, 12)}, 16),
    "rest": ({"a": f32([2], 0, 8)}, 16),
    "2**70": ({"a": f32([2**70, 0], 0, 0), "b": f32([4], 0, 16)}, 16),
    "strides": ({"a": f32([2**62, 2**62, 0], 0, 0), "b": f32([4], 0, 16)}, 16),
    "metadata": ({"__metadata__": {"format": 3}, "b": f32([4], 0, 16)}, 16),
    "end beyond the file": ({"w": f32([2], 0, 2**40)}, 8),
    "negative offset": ({"w": f32([2], -8, 0)}, 8),
    "shape larger than its data": ({"w": f32([2**40, 2**40], 0, 8)}, 8),
    "dtype": ({"w": {**f32([2], 0, 8), "dtype": "PICKLE"}}, 8),
    "shape of text": ({"w": f32("2", 0, 8)}, 8),
    "shape of floats": ({"w": f32([2.0], 0, 8)}, 8),
    "list": ({"w": [1, 2]}, 8),
    "no object": ([1, 2], 8),
}


@pytest.mark.parametrize(("header", "nbytes"), HEADERS.values(), ids=HEADERS)
def test_a_malformed_header_of_a_tensor_file_is_refused(tmp_path: Path, header: Any, nbytes: int) -> None:  # J-10, F-04
    folder = Path(written(tmp_path / "c"))
    replace_file(folder, "state.safetensors", tensor_file(header, nbytes))
    assert any("state.safetensors is not a safetensors file" in line for line in verify(folder))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load(folder).state()
    with pytest.raises(CheckpointError, match="its header claims to have"):
        read_header("x", 2**40, lambda begin, end: (2**39).to_bytes(8, "little"))


def test_verify_finds_a_tensor_that_no_map_can_hold(tmp_path: Path) -> None:
    # J-10: readers that map the file fail on it; ours copies
    save_contents(tmp_path / "c", StateToSave({"w": torch.zeros(2)}))
    header = {"b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "w": f32([2], 1, 9)}
    replace_file(tmp_path / "c", "model.safetensors", tensor_file(header, 9))
    (problem,) = verify(tmp_path / "c")
    assert "'w' begins at byte" in problem
    assert torch.equal(load(tmp_path / "c").weights()["w"], torch.zeros(2))


@requires_linux()
def test_more_files_than_a_process_may_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {f"w{number}": torch.full((100,), float(number)) for number in range(200)}
    monkeypatch.setattr(tensor_writer, "LARGE_BYTES", 400)
    save_contents(tmp_path / "c", StateToSave(weights))
    before = len(os.listdir("/proc/self/fd"))
    checkpoint = load(tmp_path / "c")
    assert len(checkpoint.weights().staged()) == 200
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_parameter_called_metadata_is_refused_and_state_of_that_name_is_kept(tmp_path: Path) -> None:  # J-12
    with pytest.raises(CheckpointError, match="named '__metadata__'"):
        save_contents(tmp_path / "c", StateToSave({"__metadata__": torch.ones(1)}))
    save_contents(tmp_path / "c", StateToSave({}, state={"__metadata__": torch.ones(1)}))
    assert torch.equal(load(tmp_path / "c").state()["__metadata__"], torch.ones(1))
