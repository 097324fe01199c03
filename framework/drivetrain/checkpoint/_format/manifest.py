"""The manifest: what a checkpoint consists of. It is written last and commits the rest."""

from __future__ import annotations

import json
import platform
import re
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from drivetrain.checkpoint._format.checksums import BLOCK, block_count
from drivetrain.checkpoint._format.documents import decode, encode
from drivetrain.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
LONGEST_MANIFEST = 2**30

# One folder holds one checkpoint, and nothing that a checkpoint says may point out of it.
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_SEAL = re.compile(rb',\n "crc32": "([0-9a-f]{8})"\n}\n\Z')


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file's size in bytes and the checksums of its blocks, eight hexadecimal digits each."""

    size: int
    crc32: str


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
class Facts:
    """What the run says about a checkpoint.

    Attributes:
        strategy: the name of the strategy that it was written under.
        precision: the name of the precision.
        progress: counters, JSON-able.
        hyper_parameters: the arguments that the module was built with, JSON-able.
        weights_only: whether no run can go on from it.
        identifier: tells it from all others; "" lets the writer draw one.
        parent: the identifier of the checkpoint that the run wrote before, or went on from; "" for none.
        lineage: the runs that it comes from, the oldest first, each with how many checkpoints it had written until the
            next one went on from it, or until this one.
    """

    strategy: str = ""
    precision: str = ""
    progress: Mapping[str, Any] = field(default_factory=dict)
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)
    weights_only: bool = False
    identifier: str = ""
    parent: str = ""
    lineage: tuple[tuple[str, int], ...] = ()

    def descends_from(self, other: Facts) -> bool:
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
    facts: Facts
    files: Mapping[str, FileRecord]
    weights: Part
    aliases: Mapping[str, str] = field(default_factory=dict)
    optimizers: tuple[Part, ...] = ()
    state: Part | None = None
    ranks: tuple[Part, ...] = ()
    written: float = field(default_factory=time.time)
    block_size: int = BLOCK
    versions: Mapping[str, str] = field(default_factory=dict)

    def parts(self) -> Iterator[Part]:
        yield self.weights
        yield from self.optimizers
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


def seal(manifest: Manifest) -> bytes:
    """Return the manifest's text, which ends with a checksum of all that comes before."""
    facts = manifest.facts
    nothing_aside: dict[str, Any] = {}
    document: dict[str, Any] = {
        "format": FORMAT,
        "id": manifest.identifier,
        "written": manifest.written,
        "versions": dict(manifest.versions),
        "world_size": manifest.world_size,
        "strategy": facts.strategy,
        "precision": facts.precision,
        "weights_only": facts.weights_only,
        "progress": encode(facts.progress, nothing_aside, "progress"),
        "hyper_parameters": encode(facts.hyper_parameters, nothing_aside, "hyper_parameters"),
        "parent": facts.parent,
        "lineage": [list(one) for one in facts.lineage],
        "weights": _part_as_json(manifest.weights),
        "aliases": dict(manifest.aliases),
        "optimizers": [_part_as_json(part) for part in manifest.optimizers],
        "state": None if manifest.state is None else _part_as_json(manifest.state),
        "ranks": [_part_as_json(part) for part in manifest.ranks],
        "block_size": manifest.block_size,
        "files": {name: {"size": one.size, "crc32": one.crc32} for name, one in manifest.files.items()},
    }
    if nothing_aside:
        raise CheckpointError(
            f"The manifest cannot hold the tensors {', '.join(nothing_aside)}.",
            "progress and hyper-parameters are JSON.",
            "keep tensors in the module, or give them to on_save_checkpoint.",
        )
    body = json.dumps(document, indent=1, allow_nan=False).encode().removesuffix(b"\n}")
    return body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode()


def _part_as_json(part: Part) -> dict[str, Any]:
    return {"document": part.document, "tensors": list(part.tensors), "index": part.index}


def unseal(content: bytes, path: str) -> Manifest:
    """Return the manifest from its text.

    Raises:
        CheckpointError: it is damaged, of another format, or points out of its folder.
    """
    try:
        document = json.loads(content)
        found = document["format"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _damaged(path, f"it cannot be read: {type(error).__name__}: {error}") from error
    if found != FORMAT:
        raise CheckpointError(
            f"{path!r} is of format {found!r}.",
            f"this version reads format {FORMAT}.",
            "load it with the version that wrote it and save its weights anew."
            if found == 0
            else "load it with a newer version of drivetrain.",
        )
    end = _SEAL.search(content)
    if end is None or int(end[1], 16) != zlib.crc32(content[: end.start()]):
        raise _damaged(path, "its checksum is another")
    try:
        return _from_json(document)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _damaged(path: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{MANIFEST} of {path!r} is damaged: {problem}.",
        "it says what the checkpoint consists of.",
        "take another checkpoint.",
    )


def _from_json(document: dict[str, Any]) -> Manifest:
    block_size = _count(document["block_size"])
    if block_size < 1:
        raise ValueError(f"blocks of {block_size} bytes")
    files = {}
    for name, one in document["files"].items():
        record = FileRecord(_count(one["size"]), str(one["crc32"]))
        if len(record.crc32) != 8 * block_count(record.size, block_size):
            raise ValueError(f"{name!r} has {len(record.crc32)} digits of checksums for {record.size} bytes")
        files[_file_name(name)] = record
    manifest = Manifest(
        identifier=str(document["id"]),
        world_size=_count(document["world_size"]),
        facts=Facts(
            strategy=str(document["strategy"]),
            precision=str(document["precision"]),
            progress=decode(document["progress"], _no_tensor),
            hyper_parameters=decode(document["hyper_parameters"], _no_tensor),
            weights_only=bool(document["weights_only"]),
            identifier=str(document["id"]),
            parent=str(document.get("parent", "")),  # versions before lineage have neither
            lineage=tuple((str(run), _count(count)) for run, count in document.get("lineage", ())),
        ),
        files=files,
        weights=_part(document["weights"]),
        aliases={str(tied): str(first) for tied, first in document["aliases"].items()},
        optimizers=tuple(_part(one) for one in document["optimizers"]),
        state=None if document["state"] is None else _part(document["state"]),
        ranks=tuple(_part(one) for one in document["ranks"]),
        written=float(document["written"]),
        block_size=block_size,
        versions={str(name): str(text) for name, text in document["versions"].items()},
    )
    unlisted = sorted({name for part in manifest.parts() for name in part.files()} - files.keys())
    if unlisted:
        raise ValueError(f"{', '.join(unlisted)} are used and not listed")
    return manifest


def _part(document: Any) -> Part:
    return Part(
        document=None if document["document"] is None else _file_name(document["document"]),
        tensors=tuple(_file_name(name) for name in document["tensors"]),
        index=None if document["index"] is None else _file_name(document["index"]),
    )


def _file_name(name: Any) -> str:
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or name == MANIFEST:
        raise ValueError(f"{name!r} is no name of a file beside it")
    return name


def _count(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no count")
    return number


def _no_tensor(name: Any) -> Any:
    raise ValueError(f"a tensor {name!r} in it")
