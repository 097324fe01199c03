"""One process: checkpoints are read back equal, open without drivetrain, and are replaced atomically.

Documents restore equal values, and reject others by name. The manifest may hold the SHA-256 of every file, so that a
signature over it covers all (J-11).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy
import pytest
import torch
from checkpoint_case import STATE, contents, equal, flip, replace_file, resealed, save_contents, token_free, written
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from drivetrain import CheckpointError, ConfigurationError
from drivetrain._distributed.control_plane import LocalControl
from drivetrain._distributed.shards import Box, Span  # what strategies request of a tensor
from drivetrain._format import StateToSave, prepare_checkpoint, tensor_writer, write_checkpoint
from drivetrain._format.documents import decode, dumps, encode, loads
from drivetrain._format.tensor_file import DTYPES
from drivetrain._storage.atomic_exchange import exchange
from drivetrain.callbacks import Checkpoint
from drivetrain.checkpoint import load, verify

URL = "memory://place/c"
_Pair = namedtuple("_Pair", "a b")
PARTS = ("model", "optimizer-0", "rank-00000", "state")
FILES = ("manifest.json", *(f"{part}.{kind}" for part in PARTS for kind in ("json", "safetensors")))


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_everything_is_read_back_equal(tmp_path: Path) -> None:
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


def test_tensors_of_every_dtype_and_layout_are_read_back_by_us_and_by_safetensors(tmp_path: Path) -> None:  # F-10
    base, integers = torch.randn(6, 8), torch.arange(256, dtype=torch.uint8)
    weights = {
        **{name: integers[: dtype.itemsize * 3].view(dtype) for name, dtype in DTYPES.items() if name != "BOOL"},
        "BOOL": torch.tensor([True, False, True]),
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": base[:1].expand(4, 8),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "one of a column": base[2:3, 3],
        "parameter": nn.Parameter(torch.randn(2)),
        "number": torch.tensor(1.5),
    }
    save_contents(tmp_path / "c", StateToSave(weights))
    back, library = dict(load(tmp_path / "c").weights()), load_file(tmp_path / "c" / "model.safetensors")
    for name, tensor in weights.items():
        bits = tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        for found in (back[name], library[name]):
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found.reshape(-1).view(torch.uint8), bits), name
    with safe_open(tmp_path / "c" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_regions_of_a_tensor(tmp_path: Path) -> None:
    whole = torch.arange(7 * 5 * 3).view(7, 5, 3)
    save_contents(tmp_path / "c", StateToSave({"w": whole, "n": torch.tensor(4)}))
    source = load(tmp_path / "c").weights().sources()["w"]
    assert torch.equal(source.read(Span(4, 50)), whole.reshape(-1)[4:50])
    for box in (Box((2, 0, 0), (3, 5, 3)), Box((1, 1, 1), (5, 3, 2)), Box((6, 4, 2), (1, 1, 1))):
        assert torch.equal(source.read(box), whole[box.index])
    assert source.read(Box((7, 0, 0), (0, 5, 3))).shape == (0, 5, 3)
    assert source.read(Span(9, 9)).shape == (0,)
    with pytest.raises(IndexError):
        source.read(Span(100, 106))
    assert load(tmp_path / "c").weights().sources()["n"].read(Box((), ())) == 4


def test_parts_are_read_independently(tmp_path: Path) -> None:
    for part, other in (("model", "optimizer-0"), ("optimizer-0", "model")):
        written(tmp_path / part)
        (tmp_path / part / f"{other}.safetensors").unlink()
    weights = load(tmp_path / "model").weights()
    assert weights["count"] == 3
    assert "head.weight" in weights
    assert len(weights) == 6
    assert load(tmp_path / "optimizer-0").optimizer_state()["state"]["layer.weight"]["step"] == 5


def test_several_files_have_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # F-10: the files of a large model, with small limits
    weights = {f"w{number}": torch.full((100,), float(number)) for number in range(10)}
    monkeypatch.setattr(tensor_writer, "LARGE_BYTES", 1000)
    save_contents(tmp_path / "c", StateToSave(weights))
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == list(weights)
    assert index["metadata"]["total_size"] == 4000
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "c" / file)[name], weights[name])
    assert equal(dict(load(tmp_path / "c").weights()), weights)


@pytest.mark.parametrize("exchanging", [True, False], ids=["exchange", "two renames"])
def test_a_save_replaces_a_checkpoint(tmp_path: Path, exchanging: bool, monkeypatch: Any) -> None:  # F-15
    if exchanging:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        if not exchange(str(tmp_path / "one"), str(tmp_path / "two")):
            pytest.skip("this disk cannot exchange two names")
    else:
        monkeypatch.setattr("drivetrain._storage.publication.exchange", lambda first, second: False)
    being_read = load(written(tmp_path / "c")).weights()
    (tmp_path / "link").symlink_to("c")
    written(tmp_path / "link", scale=2.0)
    assert (tmp_path / "link").is_symlink()
    assert being_read["layer.weight"][0, 1] == 1
    assert load(tmp_path / "c").weights()["layer.weight"][0, 1] == 2
    assert verify(tmp_path / "c") == []
    assert [name for name in names_in(tmp_path) if name.startswith(".")] == []
    save_contents(tmp_path / "c", StateToSave({"w": torch.ones(1)}))
    assert names_in(tmp_path / "c") == ["manifest.json", "model.safetensors"]


def test_a_file_url_is_a_path_on_the_local_disk(tmp_path: Path) -> None:  # F-09
    url = f"file://{tmp_path}/c"
    for scale in (1.0, 2.0):
        written(url, scale)
    assert names_in(tmp_path / "c") == list(FILES)
    assert verify(tmp_path / "c") == verify(url) == []
    for path in (url, tmp_path / "c"):
        assert load(path).weights()["layer.weight"][0, 1] == 2


@pytest.mark.parametrize("foreign", ["notes.txt", "model.bin", ".hidden"])
def test_files_of_others_are_not_replaced(tmp_path: Path, foreign: str) -> None:  # F-15
    (tmp_path / "c").mkdir()
    written(tmp_path / "c")  # an empty folder is used
    for file, message in ((tmp_path / "c" / foreign, foreign), (tmp_path / "file", "is a file")):
        file.write_text("mine")
        with pytest.raises(CheckpointError, match=message):
            written(tmp_path / file.relative_to(tmp_path).parts[0], scale=2.0)
        assert file.read_text() == "mine"
    assert verify(tmp_path / "c") == []
    assert names_in(tmp_path) == ["c", "file"]


def test_a_tensor_on_the_meta_device_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'model: layer.weight', a tensor .*on the meta device"):
        save_contents(tmp_path / "c", StateToSave({"layer.weight": torch.ones(2, device="meta")}))
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("name", FILES)
def test_verify_names_a_damaged_file(tmp_path: Path, name: str) -> None:  # F-06
    path = Path(written(tmp_path / "c")) / name
    whole = path.read_bytes()
    altered = [whole[:-1], whole + b"\n\n"]
    for position in (*range(0, len(whole), 7), len(whole) - 1):
        altered.append(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
    path.unlink()
    found = [verify(tmp_path / "c")]
    for content in altered:
        path.write_bytes(content)
        found.append(verify(tmp_path / "c"))
    assert all(name in problem for (problem,) in found)
    path.write_bytes(whole)
    assert verify(tmp_path / "c") == []


def test_a_reader_checks_the_blocks_that_it_reads(tmp_path: Path) -> None:  # F-06
    save_contents(tmp_path / "c", StateToSave(dict.fromkeys(("first", "last"), torch.zeros(3 * 2**20))))
    flip(tmp_path / "c" / "model.safetensors", -1)
    back = load(tmp_path / "c").weights()
    assert back["first"].sum() == 0
    with pytest.raises(CheckpointError, match=r"model.safetensors was altered between bytes 25165824 and"):
        back["last"]


def test_a_missing_manifest_or_another_format_is_refused(tmp_path: Path) -> None:  # F-14, K-08
    folder = Path(written(tmp_path / "c"))
    for version, fix in (
        (0, "the version of drivetrain that wrote it"),
        (1, "the version of drivetrain that wrote it"),
        (3, "a newer"),
    ):
        resealed(folder, lambda document, version=version: document.update(format=version))
        with pytest.raises(CheckpointError, match=rf"format {version}(.|\n)*{fix}"):
            load(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint: manifest\.json is missing"):
        load(folder)


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()


def test_a_checkpoint_in_a_store_is_replaced(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # F-06, F-09
    memory.pipe_file("/place/c/notes.txt", b"mine")
    pipe = memory.pipe_file
    before: dict[str, bytes] = {}
    weights: Any = {"layer.weight": torch.ones(2, 3)}

    def check_before(path: str, content: bytes) -> None:
        assert {name: memory.cat_file(name) for name in before} == before
        assert weights["layer.weight"][0, 1] == max(1, scale - 1)
        pipe(path, content)

    monkeypatch.setattr(memory, "pipe_file", check_before)
    for scale in (1, 2, 3):
        checkpoint = load(written(URL, scale))
        assert verify(URL) == []
        assert checkpoint.weights()["layer.weight"][0, 1] == scale
        assert equal(checkpoint.optimizer_state(0)["param_groups"], contents().optimizers[0]["param_groups"])
        assert equal(checkpoint.state(), STATE)
        weights = checkpoint.weights()
        before = {path: memory.cat_file(path) for path in memory.find("/place/c")}
    names = [path.rpartition("/")[2] for path in before]
    assert sorted(map(token_free, names)) == sorted([*FILES, "notes.txt"])  # files of others are kept
    monkeypatch.undo()
    manifest: Any = checkpoint.manifest
    state, rank = manifest.state.document, manifest.ranks[0].document
    memory.pipe_file(f"/place/c/{state}", b"x" * memory.size(f"/place/c/{state}"))
    memory.rm_file(f"/place/c/{rank}")
    problems = "\n".join(verify(URL))
    assert f"{state} was altered" in problems
    assert rank in problems


def test_a_url_that_leads_to_no_checkpoint_is_refused() -> None:  # F-09
    for use in (load, written):
        with pytest.raises(CheckpointError, match=r"'s3:/bucket/c' is neither a path nor a URL(.|\n)*as a str"):
            use(Path("s3://bucket/c"))
    with pytest.raises(CheckpointError, match=r"'nowhere://x' cannot be reached(.|\n)*fsspec"):
        load("nowhere://x")
    with pytest.raises(CheckpointError, match="There is no checkpoint at 'memory://place/none'"):
        load("memory://place/none")
    assert verify("memory://place/none") == ["There is no checkpoint at 'memory://place/none'."]


def restored(value: Any) -> Any:
    tensors: dict[str, Any] = {}
    text = dumps(encode(value, tensors))
    return decode(loads(text, "it"), tensors.__getitem__)


VALUES: tuple[Any, ...] = (
    *(None, True, 0, -(2**80), 0.1, -0.0, math.inf, -math.inf, "", "naïve \ud800 \x00"),
    *([], (), ((1, [2, ()]), {}), {"a": 1, "b": {"c": (None,)}}, {1: "one", (2, 3): "pair", None: 0, 0.5: "half"}),
    *({"$tuple": [1]}, {"$tensor": "weights"}, {"$pairs": [[1, 2]], "more": 1}, Counter({30: 1, 60: 2})),
    {"tensor": torch.tensor([1.5]), "deep": [(torch.tensor(2),)]},
)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_is_restored_equal(value: Any) -> None:
    assert equal(restored(value), value)


def test_nan_and_subclasses_are_restored_as_equal_values() -> None:
    assert math.isnan(restored({"x": math.nan})["x"])
    value = {"a": numpy.float64(0.1), "b": OrderedDict(x=1), "c": torch.Size([2, 3])}
    assert restored(value) == value


@pytest.mark.parametrize(
    "value",
    [object(), b"bytes", {1, 2}, 1j, Path("x"), numpy.float32(1), _Pair(1, 2)],
    ids=lambda value: type(value).__name__,
)
def test_another_value_is_refused_by_name(value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"'callbacks/Mine/2', a {type(value).__name__}"):
        encode({"callbacks": {"Mine": [0, 1, value]}}, {})
    endless = [value]
    endless[0] = endless
    with pytest.raises(CheckpointError, match="'callbacks': it contains itself"):
        encode({"of": endless}, {}, "callbacks")


def test_documents_have_the_documented_form() -> None:
    """As docs/checkpoint-format.md says, so that other readers can decode them."""
    tensors: dict[str, Any] = {}
    value = {"a": (1, math.inf), "b": {2: None}, "c": Counter({3: 1}), "d/e": torch.ones(1), "d": {"e": torch.zeros(1)}}
    assert encode(value, tensors) == {
        "a": {"$tuple": [1, {"$float": "inf"}]},
        "b": {"$pairs": [[2, None]]},
        "c": {"$counter": [[3, 1]]},
        "d/e": {"$tensor": "d/e"},
        "d": {"e": {"$tensor": "d/e~2"}},
    }
    assert equal(tensors, {"d/e": torch.ones(1), "d/e~2": torch.zeros(1)})


def test_checksums_aliases_and_extra_state_have_the_documented_form(tmp_path: Path) -> None:
    """As docs/checkpoint-format.md says, so that other readers can verify the files and read all weights."""
    folder = Path(save_contents(tmp_path / "c", contents(size=2**19)))
    text = (folder / "manifest.json").read_bytes()
    manifest, blocks = json.loads(text), {}
    assert manifest["crc32"] == f"{zlib.crc32(text[: text.rindex(b',')]):08x}"
    for name, file in manifest["files"].items():
        content, size = (folder / name).read_bytes(), manifest["block_size"]
        blocks[name] = [content[start : start + size] for start in range(0, len(content), size)]
        assert file == {"size": len(content), "crc32": "".join(f"{zlib.crc32(block):08x}" for block in blocks[name])}
    assert (set(blocks), len(blocks["model.safetensors"])) == ({*FILES} - {"manifest.json"}, 2)
    assert manifest["aliases"] == {"head.weight": "layer.weight"}
    document = json.loads((folder / manifest["weights"]["document"]).read_text())
    assert document == {"quantizer._extra_state": {"range": {"$tuple": [0.0, 1.0]}}}


WITH_DIGESTS = replace(contents(), hash_algorithm="sha256")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(save_contents(tmp_path / "c", WITH_DIGESTS))


def test_every_file_on_a_disk_and_in_a_store_has_its_digest(tmp_path: Path, monkeypatch: Any) -> None:  # J-11
    folder, store = tmp_path / "c", fsspec.filesystem("memory")
    monkeypatch.setattr(tensor_writer, "LARGE_BYTES", 40)
    save_contents(folder, WITH_DIGESTS)
    files = load(folder).manifest.files
    assert set(files) | {"manifest.json"} == set(os.listdir(folder))
    assert len(files) > 6  # weights in several files, their index, optimizer files, documents
    for name, one in files.items():
        assert one.sha256 == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert verify(folder) == []
    assert equal(load(folder).weights()["layer.weight"], contents().weights["layer.weight"])
    for _ in range(2):  # the second time over an existing checkpoint
        write_checkpoint("memory://digests/c", prepare_checkpoint(WITH_DIGESTS, 0, 1, copy=True), LocalControl())
    assert verify("memory://digests/c") == []
    for name, one in load("memory://digests/c").manifest.files.items():
        assert one.sha256 == hashlib.sha256(store.cat_file(f"/digests/c/{name}")).hexdigest()
    store.rm("/digests", recursive=True)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_verify_tells_a_forged_file_from_a_damaged_one(folder: Path, name: str) -> None:  # J-11
    flip(folder / name, -1)
    assert verify(folder) == [f"{name} was altered: 1 block(s), the first at byte 0"]
    replace_file(folder, name, (folder / name).read_bytes())
    assert verify(folder) == [f"{name} was altered: its checksums match, but its SHA-256 differs"]
    # As documented, reading goes by the checksums: a part of a file cannot verify the digest of the whole.
    assert len(load(folder).weights().staged()) == 6


@pytest.mark.parametrize("wrong", ["AB" * 32, "ab" * 31, 3, None])
def test_a_malformed_digest_is_refused(folder: Path, wrong: Any) -> None:  # J-10
    resealed(folder, lambda document: document["files"]["model.safetensors"].update(sha256=wrong))
    with pytest.raises(CheckpointError, match=r"damaged: .*SHA-256"):
        load(folder)


@pytest.mark.parametrize("wrong", ["md5", True, ["sha256"]])
def test_an_unknown_digest_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)Checkpoint\(digest=.*('sha256'|str)"):
        Checkpoint(digest=wrong)
