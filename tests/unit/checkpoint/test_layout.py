"""One process: checkpoints are read back equal, open without drivetrain, and are replaced atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from checkpoint_case import STATE, contents, equal, flip, resealed, save_contents, token_free, written
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from drivetrain import CheckpointError
from drivetrain._distributed.control_plane import LocalControl
from drivetrain._distributed.shards import Box, Span  # what strategies request of a tensor
from drivetrain.checkpoint import load, verify
from drivetrain.checkpoint._format import Contents, Sizes, commit, stage
from drivetrain.checkpoint._format.atomic_exchange import exchange
from drivetrain.checkpoint._format.tensor_file import DTYPES

FILES = (
    "manifest.json",
    "model.json",
    "model.safetensors",
    "optimizer-0.json",
    "optimizer-0.safetensors",
    "rank-00000.json",
    "rank-00000.safetensors",
    "state.json",
    "state.safetensors",
)


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


class TestReading:
    def test_everything_is_read_back_equal(self, tmp_path: Path) -> None:
        checkpoint = load(written(tmp_path / "c"))
        given = contents()
        assert equal(dict(sorted(checkpoint.weights().items())), dict(sorted(given.weights.items())))
        assert equal(checkpoint.optimizer_state(0), given.optimizers[0])
        assert equal(checkpoint.state(), STATE)
        assert equal(checkpoint.rank_state(0), given.rank_state)
        assert checkpoint.rank_state(1) is None
        assert checkpoint.progress == {"step": 5, "epoch": 1}
        assert checkpoint.hyper_parameters == {"width": 3}
        assert checkpoint.manifest.metadata.strategy == "DDPStrategy"
        assert verify(tmp_path / "c") == []
        assert names_in(tmp_path / "c") == list(FILES)  # F-04: no pickle
        checkpoint.weights()["layer.weight"].zero_()  # what was read is a copy
        assert verify(tmp_path / "c") == []

    def test_every_dtype(self, tmp_path: Path) -> None:
        weights = {
            name: torch.arange(256, dtype=torch.uint8)[: dtype.itemsize * 3].view(dtype).clone()
            for name, dtype in DTYPES.items()
            if name != "BOOL"
        }
        weights["BOOL"] = torch.tensor([True, False, True])
        save_contents(tmp_path / "c", Contents(weights))
        back = dict(load(tmp_path / "c").weights())
        library = load_file(tmp_path / "c" / "model.safetensors")
        for name, tensor in weights.items():
            assert back[name].dtype == library[name].dtype == tensor.dtype
            assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8)), name
            assert torch.equal(library[name].view(torch.uint8), tensor.view(torch.uint8)), name

    def test_tensors_that_are_not_contiguous(self, tmp_path: Path) -> None:
        base = torch.randn(6, 8)
        weights = {
            "transposed": base.t(),
            "strided": base[::2, 1::3],
            "expanded": base[:1].expand(4, 8),
            "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
            "one of a column": base[2:3, 3],
            "parameter": nn.Parameter(torch.randn(2)),
            "number": torch.tensor(1.5),
        }
        save_contents(tmp_path / "c", Contents(weights))
        for name, tensor in load(tmp_path / "c").weights().items():
            assert torch.equal(tensor, weights[name]), name

    def test_regions_of_a_tensor(self, tmp_path: Path) -> None:
        whole = torch.arange(7 * 5 * 3).view(7, 5, 3)
        save_contents(tmp_path / "c", Contents({"w": whole, "n": torch.tensor(4)}))
        source = load(tmp_path / "c").weights().sources()["w"]
        assert torch.equal(source.read(Span(4, 50)), whole.reshape(-1)[4:50])
        for box in (Box((2, 0, 0), (3, 5, 3)), Box((1, 1, 1), (5, 3, 2)), Box((6, 4, 2), (1, 1, 1))):
            assert torch.equal(source.read(box), whole[box.index])
        assert source.read(Box((7, 0, 0), (0, 5, 3))).shape == (0, 5, 3)
        assert source.read(Span(9, 9)).shape == (0,)
        with pytest.raises(IndexError):
            source.read(Span(100, 106))
        assert load(tmp_path / "c").weights().sources()["n"].read(Box((), ())) == 4

    def test_parts_are_read_independently(self, tmp_path: Path) -> None:
        for part, other in (("model", "optimizer-0"), ("optimizer-0", "model")):
            written(tmp_path / part)
            (tmp_path / part / f"{other}.safetensors").unlink()
        weights = load(tmp_path / "model").weights()
        assert weights["count"] == 3
        assert "head.weight" in weights
        assert len(weights) == 6
        assert load(tmp_path / "optimizer-0").optimizer_state()["state"]["layer.weight"]["step"] == 5


class TestSafetensorsLibrary:
    def test_it_opens_the_weights(self, tmp_path: Path) -> None:  # F-10
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        save_contents(tmp_path / "c", Contents(dict(module.state_dict())))
        again = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        again.load_state_dict(load_file(tmp_path / "c" / "model.safetensors"))
        assert equal(dict(again.state_dict()), dict(module.state_dict()))
        with safe_open(tmp_path / "c" / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}

    def test_several_files_have_an_index(self, tmp_path: Path) -> None:
        # F-10: the files of a large model, with small limits
        weights = {f"w{number}": torch.full((100,), float(number)) for number in range(10)}
        save_contents(tmp_path / "c", Contents(weights), sizes=Sizes(large=1000))
        index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
        assert list(index["weight_map"]) == list(weights)
        assert index["metadata"]["total_size"] == 4000
        files = sorted(set(index["weight_map"].values()))
        assert files == [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
        for name, file in index["weight_map"].items():
            assert torch.equal(load_file(tmp_path / "c" / file)[name], weights[name])
        assert equal(dict(load(tmp_path / "c").weights()), weights)


class TestReplacing:
    @pytest.mark.parametrize("exchanging", [True, False], ids=["exchange", "two renames"])
    def test_a_save_replaces_an_existing_checkpoint(
        self, tmp_path: Path, exchanging: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # F-15
        if exchanging:
            for name in ("one", "two"):
                (tmp_path / name).mkdir()
            if not exchange(str(tmp_path / "one"), str(tmp_path / "two")):
                pytest.skip("this disk cannot exchange two names")
        else:
            monkeypatch.setattr("drivetrain.checkpoint._format.local_storage.exchange", lambda first, second: False)
        being_read = load(written(tmp_path / "c")).weights()
        written(tmp_path / "c", scale=2.0)
        assert being_read["layer.weight"][0, 1] == 1
        assert load(tmp_path / "c").weights()["layer.weight"][0, 1] == 2
        assert verify(tmp_path / "c") == []
        assert [name for name in names_in(tmp_path) if name.startswith(".")] == []
        save_contents(tmp_path / "c", Contents({"w": torch.ones(1)}))
        assert names_in(tmp_path / "c") == ["manifest.json", "model.safetensors"]

    @pytest.mark.parametrize("foreign", ["notes.txt", "model.bin", ".hidden"])
    def test_a_folder_with_files_of_others_is_not_replaced(self, tmp_path: Path, foreign: str) -> None:
        written(tmp_path / "c")
        (tmp_path / "c" / foreign).write_text("mine")
        with pytest.raises(CheckpointError, match=foreign):
            written(tmp_path / "c", scale=2.0)
        assert (tmp_path / "c" / foreign).read_text() == "mine"
        assert verify(tmp_path / "c") == []
        assert names_in(tmp_path) == ["c"]

    def test_a_file_is_not_replaced_and_an_empty_folder_is_used(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        with pytest.raises(CheckpointError, match="is a file"):
            written(tmp_path / "file")
        (tmp_path / "c").mkdir()
        assert verify(written(tmp_path / "c")) == []

    def test_a_save_through_a_link_keeps_the_link(self, tmp_path: Path) -> None:
        written(tmp_path / "c")
        (tmp_path / "link").symlink_to("c")
        written(tmp_path / "link", scale=2.0)
        assert (tmp_path / "link").is_symlink()
        assert load(tmp_path / "c").weights()["layer.weight"][0, 1] == 2


class TestStaging:
    def test_a_snapshot_holds_the_values_at_the_time_of_the_call(self, tmp_path: Path) -> None:
        # F-08
        given = contents()
        staged = stage(given, 0, 1, snapshot=True)
        given.weights["layer.weight"].zero_()
        given.optimizers[0]["state"]["layer.weight"]["exp_avg"].zero_()
        commit(str(tmp_path / "c"), staged, LocalControl())
        checkpoint = load(tmp_path / "c")
        assert checkpoint.weights()["layer.weight"][0, 1] == 1
        assert checkpoint.optimizer_state()["state"]["layer.weight"]["exp_avg"][0, 1] == 2

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            (torch.ones(2, dtype=torch.complex128), "of dtype torch.complex128"),
            (torch.ones(2).to_sparse(), "of layout torch.sparse_coo"),
            (torch.ones(2, device="meta"), "on the meta device"),
        ],
    )
    def test_a_tensor_that_cannot_be_stored_is_named(self, tmp_path: Path, value: torch.Tensor, reason: str) -> None:
        with pytest.raises(CheckpointError, match=f"'model: layer.weight', a tensor .*{reason}"):
            save_contents(tmp_path / "c", Contents({"layer.weight": value}))
        assert names_in(tmp_path) == []


class TestDamage:
    """F-06"""

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("harm", ["missing", "truncated", "longer", "flipped at the start", "flipped at the end"])
    def test_verify_names_a_damaged_file(self, tmp_path: Path, name: str, harm: str) -> None:
        path = Path(written(tmp_path / "c")) / name
        if harm == "missing":
            path.unlink()
        elif harm == "truncated":
            path.write_bytes(path.read_bytes()[:-1])
        elif harm == "longer":
            path.write_bytes(path.read_bytes() + b"\n\n")
        else:
            flip(path, 0 if harm == "flipped at the start" else -1)
        problems = verify(tmp_path / "c")
        assert len(problems) == 1
        assert name in problems[0]

    def test_every_bit_counts(self, tmp_path: Path) -> None:
        folder = Path(written(tmp_path / "c"))
        for name in ("manifest.json", "model.safetensors", "state.json"):
            size = (folder / name).stat().st_size
            for position in range(0, size, 7):
                flip(folder / name, position)
                assert verify(folder), f"{name} at {position}"
                flip(folder / name, position)
        assert verify(folder) == []

    def test_a_reader_checks_the_blocks_that_it_reads(self, tmp_path: Path) -> None:
        weights = {"first": torch.zeros(3 * 2**20), "last": torch.zeros(3 * 2**20)}
        save_contents(tmp_path / "c", Contents(weights))
        flip(tmp_path / "c" / "model.safetensors", -1)
        back = load(tmp_path / "c").weights()
        assert back["first"].sum() == 0
        with pytest.raises(CheckpointError, match=r"model.safetensors was altered between bytes 25165824 and"):
            back["last"]

    def test_a_missing_manifest_or_another_format_is_refused(self, tmp_path: Path) -> None:
        # F-14
        folder = Path(written(tmp_path / "c"))
        for version, fix in ((0, "the version of drivetrain that wrote it"), (2, "a newer version")):
            resealed(folder, lambda document, version=version: document.update(format=version))
            with pytest.raises(CheckpointError, match=rf"format {version}(.|\n)*{fix}"):
                load(folder)
        (folder / "manifest.json").unlink()
        with pytest.raises(CheckpointError, match=r"not a complete checkpoint: manifest\.json is missing"):
            load(folder)


class TestUrls:
    """F-09"""

    @pytest.fixture
    def memory(self) -> Iterator[Any]:
        filesystem = fsspec.filesystem("memory")
        yield filesystem
        filesystem.store.clear()

    def test_a_checkpoint_in_a_store_is_replaced(self, memory: Any) -> None:
        memory.pipe_file("/place/c/notes.txt", b"mine")
        given = contents()
        for scale in (1.0, 2.0, 3.0):
            written("memory://place/c", scale)
            checkpoint = load("memory://place/c")
            assert verify("memory://place/c") == []
            assert checkpoint.weights()["layer.weight"][0, 1] == scale
            assert equal(checkpoint.optimizer_state(0)["param_groups"], given.optimizers[0]["param_groups"])
            assert equal(checkpoint.state(), STATE)
        names = [path.rpartition("/")[2] for path in memory.find("/place/c")]
        assert sorted(map(token_free, names)) == sorted([*FILES, "notes.txt"])  # files of others are kept

    def test_only_the_manifest_is_overwritten(self, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        written("memory://place/c")
        before = {path: memory.cat_file(path) for path in memory.find("/place/c")}
        weights = load("memory://place/c").weights()
        pipe = memory.pipe_file

        def check_before(path: str, content: bytes) -> None:
            assert {name: memory.cat_file(name) for name in before} == before
            assert weights["layer.weight"][0, 1] == 1
            pipe(path, content)

        monkeypatch.setattr(memory, "pipe_file", check_before)
        written("memory://place/c", 2.0)
        assert load("memory://place/c").weights()["layer.weight"][0, 1] == 2

    def test_damage_in_a_store_is_named(self, memory: Any) -> None:
        written("memory://place/c")
        manifest = load("memory://place/c").manifest
        assert manifest.state is not None
        state, rank = manifest.state.document, manifest.ranks[0].document
        memory.pipe_file(f"/place/c/{state}", b"x" * memory.size(f"/place/c/{state}"))
        memory.rm_file(f"/place/c/{rank}")
        problems = verify("memory://place/c")
        assert [any(text in line for line in problems) for text in (f"{state} was altered", str(rank))] == [True, True]

    @pytest.mark.parametrize("use", [load, written])
    def test_a_url_through_pathlib_is_refused(self, use: Any) -> None:
        with pytest.raises(CheckpointError, match=r"'s3:/bucket/c' is neither a path nor a URL(.|\n)*as a str"):
            use(Path("s3://bucket/c"))

    def test_an_unknown_protocol_and_a_missing_checkpoint_are_named(self) -> None:
        with pytest.raises(CheckpointError, match=r"'nowhere://x' cannot be reached(.|\n)*fsspec"):
            load("nowhere://x")
        with pytest.raises(CheckpointError, match="There is no checkpoint at 'memory://place/none'"):
            load("memory://place/none")
        assert verify("memory://place/none") == ["There is no checkpoint at 'memory://place/none'."]
