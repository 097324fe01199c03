"""The manifest of a checkpoint: its metadata and file list. Writing the manifest last commits the checkpoint."""

from __future__ import annotations

import platform
import re
import reprlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from drivetrain._format.checksums import BLOCK
from drivetrain._format.documents import decode, dump_with_checksum, encode, has_valid_checksum, parse_json
from drivetrain._runtime.plain_names import plain_name
from drivetrain.errors import CheckpointError, listed

FORMAT = 2
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 2**26
"""Maximum size of a manifest in bytes, which is enough for the checksums of files of 32 TiB."""
_BLOCK_SIZE_RANGE = (2**12, 2**26)  # bytes; smaller blocks are too numerous, larger ones take too much memory
_MAX_RANKS = 2**24
_MAX_TIME = 2**36  # upper bound for `Manifest.written` in seconds since 1970; it lies in the year 4147

# File names in a manifest must be plain, so that they cannot refer to files outside the checkpoint's folder.
_FILE_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_SHA256_PATTERN = re.compile(r"([0-9a-f]{64})?")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and checksums of a file.

    Attributes:
        size: size in bytes.
        crc32: checksums of the file's blocks, with eight hexadecimal digits for each block.
        sha256: fingerprint of the whole file, in hexadecimal digits; "" if none was requested.
    """

    size: int
    crc32: str
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a checkpoint, such as the weights: a JSON document and tensor files, each optional.

    Attributes:
        document: name of the JSON file.
        tensors: names of the safetensors files.
        index: name of the Hugging Face index, if there are several files.
    """

    document: str | None = None
    tensors: tuple[str, ...] = ()
    index: str | None = None

    def files(self) -> list[str]:
        """Return the names of all files of the part."""
        return [name for name in (self.document, *self.tensors, self.index) if name is not None]


@dataclass(frozen=True, slots=True)
class AveragesRecord:
    """Which of a checkpoint's tensors are averages of its weights.

    Attributes:
        callback: the key of the callback whose tensors are averages, under the weights' names.
        evaluated: whether the run evaluated with the averages, rather than with the trained weights.
    """

    callback: str
    evaluated: bool


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """What a run records about a checkpoint.

    Attributes:
        strategy: name of the strategy that the checkpoint was written with.
        precision: name of the precision.
        progress: training counters, JSON-able.
        hyper_parameters: arguments that the module was built with, JSON-able.
        left_out: names of arguments that are not stored because they are secret; nested names are joined by dots.
        run: the run that wrote the checkpoint: its "id", "name", "folder" and the class of its "module", if known.
        weights_only: whether the checkpoint holds only weights, so that no run can resume from it.
        pretrained: descriptions of the Hugging Face models in the module, by name; see `ModuleDescription`.
        base: checksums of the weights that are not stored, by name; empty if all weights are stored.
        identifier: unique id; if "", the writer generates one.
        parent: identifier of the run's previous checkpoint, or of the one that the run resumed from; "" for none.
        lineage: the runs that the checkpoint descends from, oldest first, each with the number of checkpoints that the
            run had written when the next run resumed from it. For the last run, it is the number when this checkpoint
            was written.
        argument: name of the module's argument that holds all hyper-parameters; "" if each is a separate argument.
        data_hyper_parameters: arguments that the data module was built with, JSON-able.
        data_argument: like ``argument``, but for the data module.
        averages: which tensors are averages of the weights; None if there are no averages.
        layer_versions: the versions of the submodules' states other than 1, by name, as torch keeps them in
            ``state_dict()._metadata``; None if they were not recorded.
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
    averages: AveragesRecord | None = None
    layer_versions: Mapping[str, int] | None = None

    def descends_from(self, other: CheckpointMetadata) -> bool:
        """Return whether ``other`` is an ancestor of this checkpoint in the lineage."""
        last = len(other.lineage) - 1
        if last < 0 or len(self.lineage) <= last or self.lineage[:last] != other.lineage[:last]:
            return False
        (run, count), (other_run, other_count) = self.lineage[last], other.lineage[last]
        return run == other_run and (count, len(self.lineage)) > (other_count, last + 1) and count >= other_count


def versions() -> dict[str, str]:
    """Return the versions of Python and the libraries, as the manifest records them."""
    installed = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("drivetrain", "safetensors"):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `manifest.json`."""

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
    versions: Mapping[str, str] = field(default_factory=versions)

    def parts(self) -> Iterator[Part]:
        """Yield all parts."""
        yield self.weights
        yield from self.optimizers
        yield from self.callbacks.values()
        if self.state is not None:
            yield self.state
        yield from self.ranks


# Encoding to JSON


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON text that ends with a checksum of all preceding text."""
    tensors: dict[str, Any] = {}
    document: dict[str, Any] = {
        "format": FORMAT,
        "id": manifest.identifier,
        "written": manifest.written,
        "versions": dict(manifest.versions),
        "world_size": manifest.world_size,
        **{name: _metadata_as_json(name, getattr(manifest.metadata, name), tensors) for name in _METADATA},
        "weights": asdict(manifest.weights),
        "aliases": dict(manifest.aliases),
        "optimizers": [asdict(part) for part in manifest.optimizers],
        "callbacks": {key: asdict(part) for key, part in manifest.callbacks.items()},
        "state": None if manifest.state is None else asdict(manifest.state),
        "ranks": [asdict(part) for part in manifest.ranks],
        "block_size": manifest.block_size,
        "files": {name: record_as_json(entry) for name, entry in manifest.files.items()},
    }
    if tensors:
        raise CheckpointError(
            f"The manifest cannot hold the tensors {', '.join(tensors)}.",
            "progress and hyper-parameters are stored as JSON.",
            "keep tensors in the module, or save them in on_save_checkpoint.",
        )
    content = dump_with_checksum(document)
    if len(content) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"{MANIFEST} would have {len(content)} bytes.",
            f"at most {MAX_MANIFEST_BYTES} bytes are allowed, for the hyper-parameters and the checksums of all files.",
            "move large hyper-parameters to a file, and pass its name to the module.",
        )
    return content


def record_as_json(record: FileRecord) -> dict[str, Any]:
    """Return a file record as JSON-able values."""
    fields: dict[str, Any] = {"size": record.size, "crc32": record.crc32}
    return {**fields, "sha256": record.sha256} if record.sha256 else fields


def check_metadata(metadata: CheckpointMetadata) -> None:
    """Raise if a manifest cannot hold this metadata. A run calls this before its first save.

    Raises:
        CheckpointError: the metadata is too long, or holds values that JSON cannot represent.
    """
    encode_manifest(Manifest("", 1, metadata, {}, Part()))


def _metadata_as_json(name: str, value: Any, tensors: dict[str, Any]) -> Any:
    if value and _METADATA[name] in (_values, _pretrained):
        return encode(value, tensors, name)
    if isinstance(value, AveragesRecord):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else value


# Decoding from JSON. The functions after `_from_json` return a validated value, or raise ValueError.


def decode_manifest(content: bytes, path: str) -> Manifest:
    """Return the manifest from its text.

    Raises:
        CheckpointError: the manifest is damaged, has another format, or names files outside the checkpoint's folder.
    """
    try:
        if len(content) > MAX_MANIFEST_BYTES:
            raise ValueError(f"it has more than {MAX_MANIFEST_BYTES} bytes")
        document = parse_json(content)
        if not isinstance(document, dict) or "format" not in document:
            raise ValueError("it has no format number")
        format_number = document["format"]
    except (ValueError, RecursionError) as error:
        raise _damage_error(path, f"it cannot be read: {type(error).__name__}: {error}") from error
    if type(format_number) is not int or format_number != FORMAT:
        raise CheckpointError(
            f"{path!r} has format {reprlib.repr(format_number)}.",
            f"this version of drivetrain reads format {FORMAT}.",
            "load it with the version of drivetrain that wrote it, and save its weights in a supported format."
            if type(format_number) is int and format_number < FORMAT
            else "load it with a newer version of drivetrain.",
        )
    if not has_valid_checksum(content):
        raise _damage_error(path, "its checksum does not match")
    try:
        return _from_json(document)
    except KeyError as error:
        raise _damage_error(path, f"it lacks {error}") from error
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise _damage_error(path, str(error)) from error


def files_in_manifest(content: bytes) -> set[str]:
    """Return the names of the files that a manifest lists; none if it is damaged."""
    try:
        return set(decode_manifest(content, "").files)
    except CheckpointError:
        return set()


def _damage_error(path: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{MANIFEST} of {path!r} is damaged: {problem}.",
        "without the manifest, the content of the checkpoint is unknown.",
        "use another checkpoint.",
    )


def _from_json(document: dict[str, Any]) -> Manifest:
    block_size = _count(document["block_size"])
    if not _BLOCK_SIZE_RANGE[0] <= block_size <= _BLOCK_SIZE_RANGE[1]:
        raise ValueError(f"its block size of {block_size} bytes is not supported")
    files = {}
    for name, fields in document["files"].items():
        record = FileRecord(_count(fields["size"]), _text(fields["crc32"]), _fingerprint(fields.get("sha256", "")))
        if len(record.crc32) != 8 * -(-record.size // block_size):
            raise ValueError(f"{name!r} has {len(record.crc32)} digits of checksums for {record.size} bytes")
        files[_file_name(name)] = record
    manifest = Manifest(
        identifier=_text(document["id"]),
        world_size=_count(document["world_size"]),
        metadata=CheckpointMetadata(
            identifier=_text(document["id"]), **{name: check(document[name]) for name, check in _METADATA.items()}
        ),
        files=files,
        weights=_part(document["weights"]),
        aliases={plain_name(tied): plain_name(_text(first)) for tied, first in document["aliases"].items()},
        optimizers=tuple(_part(entry) for entry in document["optimizers"]),
        callbacks={key: _part(entry) for key, entry in document["callbacks"].items()},
        state=None if document["state"] is None else _part(document["state"]),
        ranks=tuple(_part(entry) for entry in document["ranks"]),
        written=_time(document["written"]),
        block_size=block_size,
        versions=_texts(document["versions"]),
    )
    if not 1 <= manifest.world_size <= _MAX_RANKS or len(manifest.ranks) not in (0, manifest.world_size):
        raise ValueError(f"its world size is {manifest.world_size}, and it has parts of {len(manifest.ranks)} ranks")
    averages = manifest.metadata.averages
    if averages is not None and averages.callback not in manifest.callbacks:
        raise ValueError(f"it has averages of {reprlib.repr(averages.callback)}, and no tensors of this callback")
    use_counts = Counter(name for part in manifest.parts() for name in part.files())
    unlisted = sorted(use_counts.keys() - files.keys())
    shared = sorted(name for name, count in use_counts.items() if count > 1)
    if unlisted or shared:
        raise ValueError(
            f"{listed(unlisted)} are used but not listed" if unlisted else f"{listed(shared)} are used twice"
        )
    return manifest


def _fingerprint(text: Any) -> str:
    if not isinstance(text, str) or not _SHA256_PATTERN.fullmatch(text):
        raise ValueError(f"{reprlib.repr(text)} is not a SHA-256")
    return text


def _part(document: Any) -> Part:
    return Part(
        document=None if document["document"] is None else _file_name(document["document"]),
        tensors=tuple(_file_name(name) for name in document["tensors"]),
        index=None if document["index"] is None else _file_name(document["index"]),
    )


def _averages(document: Any) -> AveragesRecord | None:
    if document is None:
        return None
    return AveragesRecord(_text(document["callback"]), bool(document["evaluated"]))


def _layer_versions(document: Any) -> dict[str, int] | None:
    if document is None:
        return None
    return {name: _count(version) for name, version in document.items()}


def _pretrained(document: Any) -> dict[str, dict[str, Any]]:
    return {name: _values(entry) for name, entry in document.items()}


def _lineage(document: Any) -> tuple[tuple[str, int], ...]:
    return tuple((_text(run), _count(count)) for run, count in document)


def _file_name(name: Any) -> str:
    if not isinstance(name, str) or not _FILE_NAME_PATTERN.fullmatch(name) or name == MANIFEST:
        raise ValueError(f"{reprlib.repr(name)} is not a valid file name")
    return name


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(f"{reprlib.repr(number)} is not a count")
    return number


def _time(number: Any) -> float:
    if type(number) not in (int, float) or not 0 <= number < _MAX_TIME:
        raise ValueError(f"{reprlib.repr(number)} is not a time since 1970")
    return float(number)


def _text(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{reprlib.repr(text)} is not a string")
    return text


def _texts(document: Any) -> dict[str, str]:
    return {name: _text(text) for name, text in document.items()}


def _values(document: Any) -> dict[str, Any]:
    values = decode(document, _reject_tensor)
    if type(values) is not dict:
        raise ValueError(f"{reprlib.repr(document)} is not an object")
    return values


def _reject_tensor(name: Any) -> Any:
    raise ValueError(f"it contains a tensor {reprlib.repr(name)}")


_METADATA: dict[str, Callable[[Any], Any]] = {
    "strategy": _text,
    "precision": _text,
    "weights_only": bool,
    "progress": lambda counters: {name: _count(value) for name, value in counters.items()},
    "hyper_parameters": _values,
    "argument": _text,
    "data_hyper_parameters": _values,
    "data_argument": _text,
    "left_out": lambda names: tuple(map(_text, names)),
    "pretrained": _pretrained,
    "parent": _text,
    "lineage": _lineage,
    "run": _texts,
    "base": lambda base: {plain_name(name): text for name, text in _texts(base).items()},
    "averages": _averages,
    "layer_versions": _layer_versions,
}
"""The fields of the metadata that are keys of the document, and what validates each of them when it is read."""
