"""The manifest: what a checkpoint consists of. It is written last and commits the rest."""

from __future__ import annotations

import platform
import re
import reprlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from drivetrain.checkpoint._format.checksums import BLOCK, block_count
from drivetrain.checkpoint._format.documents import decode, encode, parse_json
from drivetrain.checkpoint._format.sealed_json import dump_with_checksum, has_valid_checksum
from drivetrain.errors import CheckpointError, listed

FORMAT = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 2**26
"""Bytes: the checksums of 32 TiB take so many."""
_BLOCK_SIZE_RANGE = (
    2**12,
    2**26,
)  # the bytes that a block may have: of smaller ones there are too many, larger ones fill memory
_MAX_RANKS = 2**24
_MAX_TIME = 2**36  # of `written`: in the year 4147

# One folder holds one checkpoint, and nothing that a checkpoint says may point out of it.
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_SHA256 = re.compile(r"([0-9a-f]{64})?")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file's size in bytes, and what its content comes to.

    Attributes:
        size: bytes.
        crc32: the checksums of its blocks, eight hexadecimal digits each.
        sha256: the digest of all of it, in hexadecimal digits; "" where none was asked for.
    """

    size: int
    crc32: str
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the things that a checkpoint holds: a JSON document and the files of its tensors, any of which may lack.

    Attributes:
        document: the name of the JSON file.
        tensors: the names of the safetensors files.
        index: of the Hugging Face index, where there are several.
    """

    document: str | None = None
    tensors: tuple[str, ...] = ()
    index: str | None = None

    def files(self) -> list[str]:
        return [name for name in (self.document, *self.tensors, self.index) if name is not None]


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """What the run says about a checkpoint.

    Attributes:
        strategy: the name of the strategy that it was written under.
        precision: the name of the precision.
        progress: counters, JSON-able.
        hyper_parameters: the arguments that the module was built with, JSON-able.
        left_out: the names of those that are secrets, joined by dots where nested.
        run: of the run that wrote it: its "id", its "name", its "folder" and the class of its "module", as far as they
            are known.
        weights_only: whether no run can go on from it.
        pretrained: of Hugging Face's models in the module, by their names in it: what `_pretrained` says of them.
        base: checksums of the values of the weights that are not in it, by name; empty where all are.
        identifier: tells it from all others; "" lets the writer draw one.
        parent: the identifier of the checkpoint that the run wrote before, or went on from; "" for none.
        lineage: the runs that it comes from, the oldest first, each with how many checkpoints it had written until the
            next one went on from it, or until this one.
        argument: the one argument of the module that holds all hyper-parameters; "" where each is an argument.
        data_hyper_parameters: the arguments that the data module was built with, JSON-able.
        data_argument: the one argument of the data module that holds them all; "" where each is an argument.
    """

    strategy: str = ""
    precision: str = ""
    progress: Mapping[str, Any] = field(default_factory=dict)
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)
    weights_only: bool = False
    identifier: str = ""
    parent: str = ""
    lineage: tuple[tuple[str, int], ...] = ()
    left_out: tuple[str, ...] = ()
    run: Mapping[str, str] = field(default_factory=dict)
    base: Mapping[str, str] = field(default_factory=dict)
    pretrained: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    argument: str = ""
    data_hyper_parameters: Mapping[str, Any] = field(default_factory=dict)
    data_argument: str = ""

    def descends_from(self, other: CheckpointMetadata) -> bool:
        """Whether a run wrote this after it had written, or gone on from, ``other``."""
        last = len(other.lineage) - 1
        if last < 0 or len(self.lineage) <= last or self.lineage[:last] != other.lineage[:last]:
            return False
        (run, count), (others_run, others_count) = self.lineage[last], other.lineage[last]
        return run == others_run and (count, len(self.lineage)) > (others_count, last + 1) and count >= others_count


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `manifest.json` says."""

    identifier: str
    world_size: int
    metadata: CheckpointMetadata
    files: Mapping[str, FileRecord]
    weights: Part
    aliases: Mapping[str, str] = field(default_factory=dict)
    optimizers: tuple[Part, ...] = ()
    callbacks: Mapping[str, Part] = field(default_factory=dict)
    state: Part | None = None
    ranks: tuple[Part, ...] = ()
    written: float = field(default_factory=time.time)
    block_size: int = BLOCK
    versions: Mapping[str, str] = field(default_factory=dict)

    def parts(self) -> Iterator[Part]:
        yield self.weights
        yield from self.optimizers
        yield from self.callbacks.values()
        if self.state is not None:
            yield self.state
        yield from self.ranks


def versions() -> dict[str, str]:
    """The libraries that a checkpoint is written with."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("drivetrain", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


# As JSON


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's text, which ends with a checksum of all that comes before."""
    metadata = manifest.metadata
    tensors: dict[str, Any] = {}
    document: dict[str, Any] = {
        "format": FORMAT,
        "id": manifest.identifier,
        "written": manifest.written,
        "versions": dict(manifest.versions),
        "world_size": manifest.world_size,
        "strategy": metadata.strategy,
        "precision": metadata.precision,
        "weights_only": metadata.weights_only,
        "progress": encode(metadata.progress, tensors, "progress"),
        "hyper_parameters": encode(metadata.hyper_parameters, tensors, "hyper_parameters"),
        "argument": metadata.argument,
        "data_hyper_parameters": encode(metadata.data_hyper_parameters, tensors, "data_hyper_parameters"),
        "data_argument": metadata.data_argument,
        "left_out": list(metadata.left_out),
        "pretrained": encode(metadata.pretrained, tensors, "pretrained"),
        "parent": metadata.parent,
        "lineage": [list(one) for one in metadata.lineage],
        "run": dict(metadata.run),
        "base": dict(metadata.base),
        "weights": _part_as_json(manifest.weights),
        "aliases": dict(manifest.aliases),
        "optimizers": [_part_as_json(part) for part in manifest.optimizers],
        "callbacks": {key: _part_as_json(part) for key, part in manifest.callbacks.items()},
        "state": None if manifest.state is None else _part_as_json(manifest.state),
        "ranks": [_part_as_json(part) for part in manifest.ranks],
        "block_size": manifest.block_size,
        "files": {name: record_as_json(one) for name, one in manifest.files.items()},
    }
    if tensors:
        raise CheckpointError(
            f"The manifest cannot hold the tensors {', '.join(tensors)}.",
            "progress and hyper-parameters are JSON.",
            "keep tensors in the module, or give them to on_save_checkpoint.",
        )
    content = dump_with_checksum(document)
    if len(content) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"{MANIFEST} would have {len(content)} bytes.",
            f"it may have {MAX_MANIFEST_BYTES}, and holds the checksums of all files and the hyper-parameters.",
            "keep large hyper-parameters in a file, and its name in the module.",
        )
    return content


def record_as_json(record: FileRecord) -> dict[str, Any]:
    described: dict[str, Any] = {"size": record.size, "crc32": record.crc32}
    return {**described, "sha256": record.sha256} if record.sha256 else described


def check_metadata(metadata: CheckpointMetadata) -> None:
    """Refuse what a run would say of its checkpoints and no manifest can hold, before there is one.

    Raises:
        CheckpointError: it is too long, or holds what JSON does not know.
    """
    encode_manifest(Manifest("", 1, metadata, {}, Part()))


def _part_as_json(part: Part) -> dict[str, Any]:
    return {"document": part.document, "tensors": list(part.tensors), "index": part.index}


def decode_manifest(content: bytes, path: str) -> Manifest:
    """Return the manifest from its text.

    Raises:
        CheckpointError: it is damaged, of another format, or points out of its folder.
    """
    try:
        if len(content) > MAX_MANIFEST_BYTES:
            raise ValueError(f"it has more than {MAX_MANIFEST_BYTES} bytes")
        document = parse_json(content)
        if not isinstance(document, dict) or "format" not in document:
            raise ValueError("it says no format")
        found = document["format"]
    except (ValueError, RecursionError) as error:
        raise _damage_error(path, f"it cannot be read: {type(error).__name__}: {error}") from error
    if type(found) is not int or found != FORMAT:
        raise CheckpointError(
            f"{path!r} is of format {reprlib.repr(found)}.",
            f"this version reads format {FORMAT}.",
            "load it with the version that wrote it and save its weights anew."
            if found == 0
            else "load it with a newer version of drivetrain.",
        )
    if not has_valid_checksum(content):
        raise _damage_error(path, "its checksum is another")
    try:
        return _from_json(document)
    except KeyError as error:
        raise _damage_error(path, f"it lacks {error}") from error
    except (ValueError, RecursionError) as error:
        raise _damage_error(path, str(error)) from error


def _damage_error(path: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{MANIFEST} of {path!r} is damaged: {problem}.",
        "it says what the checkpoint consists of.",
        "take another checkpoint.",
    )


def _from_json(document: dict[str, Any]) -> Manifest:
    block_size = _count(document["block_size"])
    if not _BLOCK_SIZE_RANGE[0] <= block_size <= _BLOCK_SIZE_RANGE[1]:
        raise ValueError(f"blocks of {block_size} bytes")
    files = {}
    for name, one in _dict(document["files"], "files").items():
        described = _dict(one, "files")
        record = FileRecord(_count(described["size"]), _text(described["crc32"]), _digest(described.get("sha256", "")))
        if len(record.crc32) != 8 * block_count(record.size, block_size):
            raise ValueError(f"{name!r} has {len(record.crc32)} digits of checksums for {record.size} bytes")
        files[_file_name(name)] = record
    without = sorted(name for name, one in files.items() if not one.sha256)
    if 0 < len(without) < len(files):
        raise ValueError(f"{listed(without)} have no digest, and others have")
    manifest = Manifest(
        identifier=_text(document["id"]),
        world_size=_count(document["world_size"]),
        metadata=CheckpointMetadata(
            strategy=_text(document["strategy"]),
            precision=_text(document["precision"]),
            progress=_dict(decode(document["progress"], _no_tensor), "progress"),
            hyper_parameters=_dict(decode(document["hyper_parameters"], _no_tensor), "hyper_parameters"),
            weights_only=bool(document["weights_only"]),
            identifier=_text(document["id"]),
            parent=_text(document.get("parent", "")),  # versions before lineage have neither
            lineage=tuple(_ancestor(one) for one in _list(document.get("lineage", []), "lineage")),
            left_out=tuple(_text(name) for name in _list(document.get("left_out", []), "left_out")),
            run={name: _text(text) for name, text in _dict(document.get("run", {}), "run").items()},
            base={name: _text(text) for name, text in _dict(document.get("base", {}), "base").items()},
            pretrained=_pretrained(decode(document.get("pretrained", {}), _no_tensor)),
            argument=_text(document.get("argument", "")),  # versions before it have none of the three
            data_hyper_parameters=_dict(
                decode(document.get("data_hyper_parameters", {}), _no_tensor), "data_hyper_parameters"
            ),
            data_argument=_text(document.get("data_argument", "")),
        ),
        files=files,
        weights=_part(document["weights"]),
        aliases={tied: _text(first) for tied, first in _dict(document["aliases"], "aliases").items()},
        optimizers=tuple(_part(one) for one in _list(document["optimizers"], "optimizers")),
        callbacks={key: _part(one) for key, one in _dict(document.get("callbacks", {}), "callbacks").items()},
        state=None if document["state"] is None else _part(document["state"]),
        ranks=tuple(_part(one) for one in _list(document["ranks"], "ranks")),
        written=_time(document["written"]),
        block_size=block_size,
        versions={name: _text(text) for name, text in _dict(document["versions"], "versions").items()},
    )
    if not 1 <= manifest.world_size <= _MAX_RANKS or len(manifest.ranks) not in (0, manifest.world_size):
        raise ValueError(f"{len(manifest.ranks)} ranks of {manifest.world_size} have something in it")
    used = Counter(name for part in manifest.parts() for name in part.files())
    unlisted, shared = sorted(used.keys() - files.keys()), sorted(name for name, count in used.items() if count > 1)
    if unlisted or shared:
        raise ValueError(f"{listed(unlisted)} are used and not listed" if unlisted else f"{listed(shared)} are shared")
    return manifest


def _digest(text: Any) -> str:
    if not isinstance(text, str) or not _SHA256.fullmatch(text):
        raise ValueError(f"{reprlib.repr(text)} is no SHA-256")
    return text


def _part(document: Any) -> Part:
    described = _dict(document, "a part")
    return Part(
        document=None if described["document"] is None else _file_name(described["document"]),
        tensors=tuple(_file_name(name) for name in _list(described["tensors"], "tensors")),
        index=None if described["index"] is None else _file_name(described["index"]),
    )


def _pretrained(document: Any) -> dict[str, dict[str, Any]]:
    models = {name: _dict(one, "a model") for name, one in _dict(document, "pretrained").items()}
    for one in models.values():
        for key in one.keys() & {"config", "generation_config", "adapters"}:
            _dict(one[key], key)
        for settings in one.get("adapters", {}).values():
            _dict(settings, "an adapter")
        _text(one.get("adapter_prefix", ""))
        if not one.keys() & {"config", "adapters"}:
            raise ValueError("a model has neither a configuration nor adapters")
    return models


def _ancestor(document: Any) -> tuple[str, int]:
    if len(_list(document, "lineage")) != 2:
        raise ValueError(f"{reprlib.repr(document)} is no ancestor")
    return _text(document[0]), _count(document[1])


def _file_name(name: Any) -> str:
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name == MANIFEST:
        raise ValueError(f"{reprlib.repr(name)} is no name of a file beside it")
    return name


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(f"{reprlib.repr(number)} is no count")
    return number


def _time(number: Any) -> float:
    if type(number) not in (int, float) or not 0 <= number < _MAX_TIME:
        raise ValueError(f"{reprlib.repr(number)} is no time since 1970")
    return float(number)


def _text(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{reprlib.repr(text)} is no text")
    return text


def _dict(value: Any, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{reprlib.repr(value)} is no object for {what}")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{reprlib.repr(value)} is no list for {what}")
    return value


def _no_tensor(name: Any) -> Any:
    raise ValueError(f"a tensor {reprlib.repr(name)} in it")
