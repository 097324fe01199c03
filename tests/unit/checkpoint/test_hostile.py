"""Hostile checkpoints: whatever the bytes, reading them ends quickly, with a value or a clear error.

`tests/faults/test_mutated_checkpoints.py` draws such checkpoints by the thousand.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_case import resealed, written
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain import CheckpointError
from drivetrain._distributed.control_plane import LocalControl
from drivetrain.checkpoint import load, verify
from drivetrain.checkpoint._format import Contents, save
from drivetrain.checkpoint._format.checksums import checksums_of
from drivetrain.checkpoint._format.documents import decode, dumps, loads
from drivetrain.checkpoint._format.tensor_file import read_header
from newest_checkpoint import newest


def put(folder: Path, name: str, content: bytes) -> None:
    """Replace a file's content, and its checksums in the manifest."""
    (folder / name).write_bytes(content)
    sums = checksums_of(content)
    record = {"size": sums.size, "crc32": sums.text()}
    resealed(folder, lambda document: document["files"].update({name: record}))


def tensors(header: Any, nbytes: int) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(nbytes)


def f32(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


class TestManifests:
    @pytest.mark.parametrize(
        "planted",
        [
            {"written": 1e20},
            {"written": 10**400},
            {"written": True},
            {"progress": _nested(700)},
            {"hyper_parameters": _nested(300)},
            {"extra": _nested(900)},
            {"block_size": 2**40},
            {"block_size": 1},
            {"world_size": 10**15},
            {"lineage": [["run", 1, 2]]},
            {"aliases": {"a": 1}},
            {"pretrained": {"model": 1}},
            {"averages": []},
            {"averages": {"callback": "EMA"}},
            {"averages": {"callback": ["EMA"], "evaluated": True}},
            {"averages": {"callback": "EMA", "evaluated": True}},  # there is no callback of this name
            {"format": 10**400},
        ],
        ids=lambda planted: next(iter(planted)),
    )
    def test_a_planted_folder_stops_nobody(self, tmp_path: Path, planted: dict[str, Any]) -> None:
        # J-10: ckpt_path="auto" skips it
        written(tmp_path / "good")
        resealed(Path(written(tmp_path / "planted")), lambda document: document.update(planted))
        if "extra" not in planted:  # an unknown key is harmless as long as it parses
            with pytest.raises(CheckpointError) as caught:
                load(tmp_path / "planted")
            assert len(str(caught.value)) < 1000
        checkpoint = newest([str(tmp_path)])
        assert checkpoint is not None
        assert checkpoint.path.endswith("good") or "extra" in planted

    @pytest.mark.parametrize("kind", ["pipe", "link", "link to itself", "directory", "device"])
    def test_what_is_no_file(self, tmp_path: Path, kind: str) -> None:
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


class TestTensors:
    @pytest.mark.parametrize(
        "header",
        [
            {"a": f32([2], 0, 8), "b": f32([2], 4, 12)},
            {"a": f32([2], 0, 8), "b": f32([1], 12, 16)},
            {"a": f32([2], 4, 12)},
            {"a": f32([2], 0, 8)},
            {"a": f32([2**70, 0], 0, 0), "b": f32([4], 0, 16)},
            {"a": f32([2**62, 2**62, 0], 0, 0), "b": f32([4], 0, 16)},
            {"__metadata__": {"format": 3}, "b": f32([4], 0, 16)},
        ],
        ids=["overlap", "gap", "gap at the start", "rest", "2**70", "strides", "metadata"],
    )
    def test_what_safetensors_refuses_is_refused(self, tmp_path: Path, header: dict[str, Any]) -> None:
        # J-10
        folder = Path(written(tmp_path / "c"))
        nbytes = 12 if header.get("b") == f32([2], 4, 12) else 16
        put(folder, "state.safetensors", tensors(header, nbytes))
        assert any("state.safetensors is not a safetensors file" in line for line in verify(folder))
        with pytest.raises(CheckpointError, match="not a safetensors file"):
            load(folder).state()

    def test_verify_finds_a_tensor_that_no_map_can_hold(self, tmp_path: Path) -> None:
        # J-10: readers that map the file fail on it; ours copies
        save(str(tmp_path / "c"), Contents({"w": torch.zeros(2)}), LocalControl())
        header = {"b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "w": f32([2], 1, 9)}
        put(tmp_path / "c", "model.safetensors", tensors(header, 9))
        (problem,) = verify(tmp_path / "c")
        assert "'w' begins at byte" in problem
        assert torch.equal(load(tmp_path / "c").weights()["w"], torch.zeros(2))

    def test_more_files_than_a_process_may_open(self, tmp_path: Path) -> None:
        weights = {f"w{number}": torch.full((100,), float(number)) for number in range(200)}
        from drivetrain.checkpoint._format import Sizes

        save(str(tmp_path / "c"), Contents(weights), LocalControl(), sizes=Sizes(large=400))
        before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
        checkpoint = load(tmp_path / "c")
        assert len(checkpoint.weights().staged()) == 200
        if before:
            assert len(os.listdir("/proc/self/fd")) < before + 70
            checkpoint.close()
            assert len(os.listdir("/proc/self/fd")) <= before


class TestNames:
    def test_a_parameter_called_metadata_is_refused(self, tmp_path: Path) -> None:
        # J-12: the tensor was silently dropped
        with pytest.raises(CheckpointError, match="named '__metadata__'"):
            save(str(tmp_path / "c"), Contents({"__metadata__": torch.ones(1)}), LocalControl())

    def test_state_called_metadata_is_kept(self, tmp_path: Path) -> None:
        # J-12
        save(str(tmp_path / "c"), Contents({}, state={"__metadata__": torch.ones(1)}), LocalControl())
        assert torch.equal(load(tmp_path / "c").state()["__metadata__"], torch.ones(1))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$tensor", "$tuple", "$float", "$pairs", "$counter"]), inner, max_size=1)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_any_json_is_a_value_or_an_error(value: Any) -> None:
    # J-10
    with contextlib.suppress(CheckpointError, AttributeError, TypeError, ValueError, KeyError):
        decode(loads(dumps(value), "it"), {"": torch.ones(1)}.__getitem__)


ENTRIES: Any = st.dictionaries(
    st.sampled_from(["dtype", "shape", "data_offsets", "x"]),
    st.sampled_from(["F32", "U8", [], [1], [0, 4], [4, 8], [2**70], [True], [-1], None, 4, {}]),
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRIES, max_size=3), st.integers(0, 16))
def test_any_header_is_a_list_of_tensors_or_an_error(header: Any, nbytes: int) -> None:
    # J-10
    content = tensors(header, nbytes)
    try:
        for entry in read_header("it", len(content), lambda begin, end: content[begin:end]).values():
            assert 0 <= entry.begin <= entry.end <= len(content)
            torch.empty(entry.numel, dtype=entry.dtype).view(entry.shape)
    except CheckpointError:
        pass
