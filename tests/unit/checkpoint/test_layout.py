"""One process: checkpoints are read back equal, open without drivetrain, and are replaced atomically."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_case import STATE, contents, equal, flip, resealed, token_free, written
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from drivetrain import CheckpointError
from drivetrain._distributed.control_plane import LocalControl
from drivetrain._distributed.shards import Box, Span
from drivetrain.checkpoint import load, verify
from drivetrain.checkpoint._format import Contents, Sizes, commit, save, stage
from drivetrain.checkpoint._format.atomic_exchange import exchange
from drivetrain.checkpoint._format.tensor_file import DTYPES, Spec
from drivetrain.checkpoint._format.write_plan import plan_files

LOCAL = LocalControl()


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


class TestWhatComesBack:
    def test_everything(self, tmp_path: Path) -> None:
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

    def test_every_dtype(self, tmp_path: Path) -> None:
        weights = {
            name: torch.arange(256, dtype=torch.uint8)[: dtype.itemsize * 3].view(dtype).clone()
            for name, dtype in DTYPES.items()
            if name != "BOOL"
        }
        weights["BOOL"] = torch.tensor([True, False, True])
        save(str(tmp_path / "c"), Contents(weights), LOCAL)
        back = dict(load(tmp_path / "c").weights())
        library = load_file(tmp_path / "c" / "model.safetensors")
        for name, tensor in weights.items():
            assert back[name].dtype == library[name].dtype == tensor.dtype
            assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8)), name
            assert torch.equal(library[name].view(torch.uint8), tensor.view(torch.uint8)), name

    def test_tensors_that_are_no_plain_block_of_memory(self, tmp_path: Path) -> None:
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
        save(str(tmp_path / "c"), Contents(weights), LOCAL)
        for name, tensor in load(tmp_path / "c").weights().items():
            assert torch.equal(tensor, weights[name]), name

    def test_regions(self, tmp_path: Path) -> None:
        whole = torch.arange(7 * 5 * 3).view(7, 5, 3)
        save(str(tmp_path / "c"), Contents({"w": whole, "n": torch.tensor(4)}), LOCAL)
        source = load(tmp_path / "c").weights().sources()["w"]
        assert torch.equal(source.read(Span(4, 50)), whole.reshape(-1)[4:50])
        for box in (Box((2, 0, 0), (3, 5, 3)), Box((1, 1, 1), (5, 3, 2)), Box((6, 4, 2), (1, 1, 1))):
            assert torch.equal(source.read(box), whole[box.index])
        assert source.read(Box((7, 0, 0), (0, 5, 3))).shape == (0, 5, 3)
        assert source.read(Span(9, 9)).shape == (0,)
        with pytest.raises(IndexError):
            source.read(Span(100, 106))
        assert load(tmp_path / "c").weights().sources()["n"].read(Box((), ())) == 4

    def test_values_of_a_parameters_shape_come_as_the_wanted_part(self, tmp_path: Path) -> None:
        checkpoint = load(written(tmp_path / "c"))
        state = checkpoint.optimizer_state(0, {"layer.weight": Box((1, 0), (1, 3))})["state"]["layer.weight"]
        assert torch.equal(state["exp_avg"].local, torch.tensor([[4.0, 5.0, 6.0]]))
        assert state["exp_avg"].shape == (2, 3)
        assert torch.equal(state["step"], torch.tensor(5.0))
        staged = checkpoint.weights().staged({"layer.weight": Span(1, 3)})
        assert torch.equal(staged["layer.weight"].local, torch.tensor([1.0, 2.0]))
        assert staged["head.weight"] is staged["layer.weight"]

    def test_what_was_read_may_be_written_to(self, tmp_path: Path) -> None:
        checkpoint = load(written(tmp_path / "c"))
        checkpoint.weights()["layer.weight"].zero_()
        assert verify(tmp_path / "c") == []

    def test_weights_are_read_one_by_one(self, tmp_path: Path) -> None:
        path = written(tmp_path / "c")
        weights = load(path).weights()
        (tmp_path / "c" / "optimizer-0.safetensors").unlink()
        assert weights["count"] == 3
        assert "head.weight" in weights
        assert len(weights) == 6


class TestWithoutUs:
    def test_safetensors_opens_the_weights(self, tmp_path: Path) -> None:
        # F-10
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        save(str(tmp_path / "c"), Contents(dict(module.state_dict())), LOCAL)
        again = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        again.load_state_dict(load_file(tmp_path / "c" / "model.safetensors"))
        assert equal(dict(again.state_dict()), dict(module.state_dict()))
        with safe_open(tmp_path / "c" / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}

    def test_no_pickle_and_nothing_unexpected(self, tmp_path: Path) -> None:
        # F-04
        written(tmp_path / "c")
        assert names_in(tmp_path) == ["c"]
        assert {path.suffix for path in (tmp_path / "c").iterdir()} == {".json", ".safetensors"}

    def test_several_files_carry_the_index(self, tmp_path: Path) -> None:
        # F-10: the files of a large model, with small limits
        weights = {f"w{number}": torch.full((100,), float(number)) for number in range(10)}
        save(str(tmp_path / "c"), Contents(weights), LOCAL, sizes=Sizes(large=1000))
        index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
        assert list(index["weight_map"]) == list(weights)
        assert index["metadata"]["total_size"] == 4000
        files = sorted(set(index["weight_map"].values()))
        assert files == [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
        for name, file in index["weight_map"].items():
            assert torch.equal(load_file(tmp_path / "c" / file)[name], weights[name])
        assert equal(dict(load(tmp_path / "c").weights()), weights)


class TestDealing:
    @pytest.mark.parametrize("world_size", [1, 2, 3, 8])
    def test_balanced_and_complete(self, world_size: int) -> None:
        specs = [Spec(f"w{n}", torch.float32, (n % 7 + 1, 1000)) for n in range(60)]
        files = plan_files("model", specs, world_size, Sizes(small=4000))
        assert sorted(spec.name for file in files for spec in file.specs) == sorted(spec.name for spec in specs)
        assert [file.owner for file in files] == list(range(world_size))
        sizes = [sum(spec.nbytes for spec in file.specs) for file in files]
        assert max(sizes) - min(sizes) <= 2 * 7 * 4000

    def test_small_ones_share_a_file(self) -> None:
        specs = [Spec(f"w{n}", torch.float32, (10,)) for n in range(60)]
        assert [file.name for file in plan_files("model", specs, 8, Sizes())] == ["model.safetensors"]
        assert plan_files("state", [], 8, Sizes()) == []

    def test_large_ones_are_split_for_one_rank_too(self) -> None:
        specs = [Spec(f"w{n}", torch.float32, (1000,)) for n in range(60)]
        assert [file.owner for file in plan_files("model", specs, 2, Sizes(large=60_000))] == [0, 0, 1, 1]

    def test_wide_elements_come_first(self) -> None:
        specs = [Spec("a", torch.int8, (3,)), Spec("b", torch.float64, (1,)), Spec("c", torch.float16, (1,))]
        assert [spec.name for spec in plan_files("model", specs, 1, Sizes())[0].specs] == ["b", "c", "a"]


class TestReplacing:
    @pytest.fixture(params=[True, False], ids=["exchange", "two renames"])
    def exchanging(self, request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bool:
        if request.param:
            (tmp_path / "one").mkdir()
            (tmp_path / "two").mkdir()
            if not exchange(str(tmp_path / "one"), str(tmp_path / "two")):
                pytest.skip("this disk cannot exchange two names")
        else:
            monkeypatch.setattr("drivetrain.checkpoint._format.local_storage.exchange", lambda first, second: False)
        return bool(request.param)

    def test_the_new_one_takes_the_place_of_the_old(self, tmp_path: Path, exchanging: bool) -> None:
        written(tmp_path / "c")
        written(tmp_path / "c", scale=2.0)
        assert load(tmp_path / "c").weights()["layer.weight"][0, 1] == 2
        assert verify(tmp_path / "c") == []
        assert [name for name in names_in(tmp_path) if name.startswith(".")] == []

    def test_one_that_is_being_read_stays_readable(self, tmp_path: Path, exchanging: bool) -> None:
        weights = load(written(tmp_path / "c")).weights()
        written(tmp_path / "c", scale=2.0)
        assert weights["layer.weight"][0, 1] == 1

    def test_nothing_of_an_earlier_one_stays(self, tmp_path: Path, exchanging: bool) -> None:
        # F-15
        written(tmp_path / "c")
        save(str(tmp_path / "c"), Contents({"w": torch.ones(1)}), LOCAL)
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

    def test_nor_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "c").write_text("mine")
        with pytest.raises(CheckpointError, match="is a file"):
            written(tmp_path / "c")

    def test_an_empty_folder_is_taken(self, tmp_path: Path) -> None:
        (tmp_path / "c").mkdir()
        assert verify(written(tmp_path / "c")) == []

    def test_through_a_link(self, tmp_path: Path) -> None:
        written(tmp_path / "c")
        (tmp_path / "link").symlink_to("c")
        written(tmp_path / "link", scale=2.0)
        assert (tmp_path / "link").is_symlink()
        assert load(tmp_path / "c").weights()["layer.weight"][0, 1] == 2


class TestStaging:
    def test_a_snapshot_is_of_the_moment(self, tmp_path: Path) -> None:
        # F-08
        given = contents()
        staged = stage(given, 0, 1, snapshot=True)
        given.weights["layer.weight"].zero_()
        given.optimizers[0]["state"]["layer.weight"]["exp_avg"].zero_()
        commit(str(tmp_path / "c"), staged, LOCAL)
        checkpoint = load(tmp_path / "c")
        assert checkpoint.weights()["layer.weight"][0, 1] == 1
        assert checkpoint.optimizer_state()["state"]["layer.weight"]["exp_avg"][0, 1] == 2

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            (torch.ones(2, dtype=torch.complex128), "of dtype torch.complex128"),
            (torch.ones(2).to_sparse(), "of layout torch.sparse_coo"),
            (torch.ones(2, device="meta"), "on the meta device"),
        ],
    )
    def test_what_cannot_be_stored_is_refused_by_name(self, tmp_path: Path, value: torch.Tensor, said: str) -> None:
        with pytest.raises(CheckpointError, match=f"'model: layer.weight', a tensor .*{said}"):
            save(str(tmp_path / "c"), Contents({"layer.weight": value}), LOCAL)
        assert names_in(tmp_path) == []


class TestDamage:
    """F-06"""

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

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("harm", ["missing", "truncated", "longer", "flipped at the start", "flipped at the end"])
    def test_verify_names_it(self, tmp_path: Path, name: str, harm: str) -> None:
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

    def test_verify_names_them_all(self, tmp_path: Path) -> None:
        folder = Path(written(tmp_path / "c"))
        flip(folder / "state.json", 5)
        (folder / "model.safetensors").unlink()
        problems = verify(folder)
        assert [any(name in line for line in problems) for name in ("state.json", "model.safetensors", "rank")] == [
            True,
            True,
            False,
        ]

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
        save(str(tmp_path / "c"), Contents(weights), LOCAL)
        flip(tmp_path / "c" / "model.safetensors", -1)
        back = load(tmp_path / "c").weights()
        assert back["first"].sum() == 0
        with pytest.raises(CheckpointError, match=r"model.safetensors was altered between bytes 25165824 and"):
            back["last"]

    def test_a_missing_manifest_means_no_checkpoint(self, tmp_path: Path) -> None:
        folder = Path(written(tmp_path / "c"))
        (folder / "manifest.json").unlink()
        with pytest.raises(CheckpointError, match=r"not a complete checkpoint: manifest\.json is missing"):
            load(folder)

    def test_other_formats_are_refused_by_version(self, tmp_path: Path) -> None:
        # F-14
        folder = Path(written(tmp_path / "c"))
        for version, way_out in ((0, "the version of drivetrain that wrote it"), (2, "a newer version")):
            resealed(folder, lambda document, version=version: document.update(format=version))
            with pytest.raises(CheckpointError, match=rf"format {version}(.|\n)*{way_out}"):
                load(folder)


class TestStrangers:
    """F-04"""

    @pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "..", ".hidden", "", "manifest.json", "a\\b"])
    def test_names_that_point_elsewhere_are_refused(self, tmp_path: Path, name: str) -> None:
        folder = Path(written(tmp_path / "c"))

        def rename(document: dict[str, Any]) -> None:
            document["files"][name] = document["files"].pop("model.safetensors")
            document["weights"]["tensors"] = [name]

        resealed(folder, rename)
        with pytest.raises(CheckpointError, match="is not a valid file name"):
            load(folder)

    @pytest.mark.parametrize(
        "change",
        [
            lambda document: document["files"]["model.safetensors"].update(size=-1),
            lambda document: document["files"]["model.safetensors"].update(size=2**62),
            lambda document: document.update(block_size=0),
            lambda document: document.update(files=[]),
            lambda document: document.update(weights="model.safetensors"),
            lambda document: document.pop("ranks"),
            lambda document: document["weights"].update(tensors=["other.safetensors"]),
            lambda document: document.update(progress={"$tensor": "x"}),
        ],
    )
    def test_a_forged_manifest_is_refused(self, tmp_path: Path, change: Any) -> None:
        folder = Path(written(tmp_path / "c"))
        resealed(folder, change)
        with pytest.raises(CheckpointError, match="is damaged"):
            load(folder)

    @pytest.mark.parametrize(
        "header",
        [
            {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 2**40]}},
            {"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
            {"w": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}},
            {"w": {"dtype": "PICKLE", "shape": [2], "data_offsets": [0, 8]}},
            {"w": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}},
            {"w": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
            {"w": [1, 2]},
            [1, 2],
            None,
        ],
    )
    def test_a_forged_header_is_refused(self, tmp_path: Path, header: Any) -> None:
        from drivetrain.checkpoint._format.checksums import checksums_of

        folder = Path(written(tmp_path / "c"))
        text = json.dumps(header).encode() if header is not None else b"\x80\x04pickle"
        content = len(text).to_bytes(8, "little") + text + bytes(8)
        (folder / "model.safetensors").write_bytes(content)
        sums = checksums_of(content)
        resealed(
            folder,
            lambda document: document["files"].update({"model.safetensors": {"size": sums.size, "crc32": sums.text()}}),
        )
        with pytest.raises(CheckpointError, match=r"model.safetensors is not a safetensors file"):
            load(folder).weights()
        assert len(verify(folder)) == 1

    def test_a_header_of_any_length_is_bounded(self, tmp_path: Path) -> None:
        from drivetrain.checkpoint._format.tensor_file import read_header

        with pytest.raises(CheckpointError, match="its header claims to have"):
            read_header("x", 2**40, lambda begin, end: (2**39).to_bytes(8, "little"))


class TestUrls:
    """F-09"""

    @pytest.fixture
    def memory(self) -> Any:
        import fsspec

        filesystem = fsspec.filesystem("memory")
        yield filesystem
        filesystem.store.clear()

    def test_memory(self, memory: Any) -> None:
        given = contents()
        for scale in (1.0, 2.0, 3.0):
            written("memory://place/c", scale)
            checkpoint = load("memory://place/c")
            assert verify("memory://place/c") == []
            assert checkpoint.weights()["layer.weight"][0, 1] == scale
            assert equal(checkpoint.optimizer_state(0)["param_groups"], given.optimizers[0]["param_groups"])
            assert equal(checkpoint.state(), STATE)
        names = [path.rpartition("/")[2] for path in memory.find("/place/c")]
        assert sorted(map(token_free, names)) == list(TestDamage.FILES)

    def test_only_the_manifest_is_overwritten(self, memory: Any) -> None:
        written("memory://place/c")
        before = {path: memory.cat_file(path) for path in memory.find("/place/c")}
        weights = load("memory://place/c").weights()

        class Checking:
            """No file of the old checkpoint changes until the manifest is written."""

            def __init__(self, pipe: Any) -> None:
                self.pipe = pipe

            def __call__(self, path: str, content: bytes) -> None:
                assert {name: memory.cat_file(name) for name in before} == before
                assert weights["layer.weight"][0, 1] == 1
                self.pipe(path, content)

        memory.pipe_file = Checking(memory.pipe_file)
        try:
            written("memory://place/c", 2.0)
        finally:
            del memory.pipe_file
        assert load("memory://place/c").weights()["layer.weight"][0, 1] == 2

    def test_damage_in_an_object_store(self, memory: Any) -> None:
        written("memory://place/c")
        manifest = load("memory://place/c").manifest
        assert manifest.state is not None
        state, rank = manifest.state.document, manifest.ranks[0].document
        memory.pipe_file(f"/place/c/{state}", b"x" * memory.size(f"/place/c/{state}"))
        memory.rm_file(f"/place/c/{rank}")
        problems = verify("memory://place/c")
        assert [any(text in line for line in problems) for text in (f"{state} was altered", str(rank))] == [True, True]

    def test_files_of_others_stay(self, memory: Any) -> None:
        memory.pipe_file("/place/c/notes.txt", b"mine")
        written("memory://place/c")
        written("memory://place/c", 2.0)
        assert memory.cat_file("/place/c/notes.txt") == b"mine"
        assert verify("memory://place/c") == []

    def test_a_file_url_is_the_local_disk(self, tmp_path: Path) -> None:
        written(f"file://{tmp_path}/c")
        written(f"file://{tmp_path}/c", 2.0)
        assert names_in(tmp_path / "c") == list(TestDamage.FILES)
        assert verify(tmp_path / "c") == verify(f"file://{tmp_path}/c") == []

    @pytest.mark.parametrize("use", [load, written])
    def test_a_url_through_pathlib_is_refused(self, use: Any) -> None:
        with pytest.raises(CheckpointError, match=r"'s3:/bucket/c' is neither a path nor a URL(.|\n)*as a str"):
            use(Path("s3://bucket/c"))

    def test_an_unknown_protocol(self) -> None:
        with pytest.raises(CheckpointError, match=r"'nowhere://x' cannot be reached(.|\n)*fsspec"):
            load("nowhere://x")

    def test_nothing_there(self, memory: Any) -> None:
        with pytest.raises(CheckpointError, match="There is no checkpoint at 'memory://place/none'"):
            load("memory://place/none")
        assert verify("memory://place/none") == ["There is no checkpoint at 'memory://place/none'."]
