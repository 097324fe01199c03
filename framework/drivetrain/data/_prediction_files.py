"""The file format of written predictions: a start document, parts, and a manifest that commits the parts.

A part has three files: tensors as safetensors, all other values as JSON, and an index. The index is written last and
lists the batches of the outputs; a part without an index is ignored. docs/predictions.md describes the format.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from drivetrain.checkpoint._format.checksums import BLOCK
from drivetrain.checkpoint._format.documents import parse_json
from drivetrain.checkpoint._format.folder import StorageError
from drivetrain.checkpoint._format.manifest import FileRecord, record_as_json, versions
from drivetrain.checkpoint._format.sealed_json import dump_with_checksum, has_valid_checksum
from drivetrain.checkpoint._format.tensor_reader import damage_error
from drivetrain.errors import CheckpointError

FORMAT_VERSION = 1
START_DOCUMENT = "beginning.json"
MANIFEST = "predictions.json"
LOCK = "writing.lock"
MAX_DOCUMENT_BYTES = 2**28
"""The maximum size of a document in bytes."""

_STEM = r"part-\d{5,}-\d{6,}-[0-9a-f]{16}"
_INDEX = re.compile(rf"({_STEM})\.index\.json")
_PREDICTION_FILE = re.compile(
    rf"{_STEM}(\.index)?\.json|{_STEM}\.safetensors|\.?{MANIFEST}(-[0-9a-f]+)?|\.?{START_DOCUMENT}(-[0-9a-f]+)?"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """Identifies the batch of an output.

    Attributes:
        loader: the number of the loader.
        batch: the number of the loader's micro-batch on the rank.
        rank: the data rank.
        samples: the number of samples in the batch.
        runs: the data-set indices of the samples, in the order of the output, as runs of consecutive indices. Each
            run is given by its first index and its length. None if samples have no indices.
    """

    loader: int
    batch: int
    rank: int
    samples: int
    runs: tuple[tuple[int, int], ...] | None


@dataclass(frozen=True, slots=True)
class Part:
    """Several outputs that are stored together.

    Attributes:
        stem: the common beginning of the names of the part's files.
        entries: one entry for each output, in the order of the outputs.
        files: the records of the part's files by name: the file of tensors, if any, and the file of other values.
    """

    stem: str
    entries: tuple[Entry, ...]
    files: Mapping[str, FileRecord]

    @property
    def index(self) -> str:
        return f"{self.stem}.index.json"

    @property
    def values(self) -> str:
        return f"{self.stem}.json"

    @property
    def tensors(self) -> str:
        return f"{self.stem}.safetensors"


def is_prediction_file(name: str) -> bool:
    """Return whether a file name belongs to written predictions."""
    return name == LOCK or _PREDICTION_FILE.fullmatch(name) is not None


def part_stems(names: Sequence[str]) -> list[str]:
    """Return the stems of the parts whose index is among the file names."""
    return sorted(match[1] for name in names if (match := _INDEX.fullmatch(name)))


# Encoding and decoding of the start document, the part indices and the manifest


def encode_start_document(identity: Mapping[str, Any]) -> bytes:
    """Return the start document, which identifies the weights and data of the predictions."""
    return dump_with_checksum({"format": FORMAT_VERSION, "identity": dict(identity)})


def encode_manifest(identity: Mapping[str, Any], parts: Sequence[Part], indices: Mapping[str, FileRecord]) -> bytes:
    """Return the content of the manifest, which commits the parts.

    Args:
        identity: the identity in the start document.
        parts: all parts.
        indices: the records of the parts' index files, by name.
    """
    records = {name: record for part in parts for name, record in part.files.items()} | dict(indices)
    return dump_with_checksum(
        {
            "format": FORMAT_VERSION,
            "identity": dict(identity),
            "versions": versions(),
            "block_size": BLOCK,
            "parts": [part.stem for part in parts],
            "files": {name: record_as_json(record) for name, record in records.items()},
        }
    )


def encode_part_index(part: Part) -> bytes:
    """Return the content of a part's index file."""
    return dump_with_checksum(
        {
            "format": FORMAT_VERSION,
            "entries": entries_to_json(part.entries),
            "files": {name: record_as_json(record) for name, record in part.files.items()},
        }
    )


def decode_part_index(stem: str, content: bytes, path: str) -> Part:
    """Return a part from the content of its index file.

    Raises:
        CheckpointError: the index is damaged or incomplete.
    """
    document = parse_document(content, f"{stem}.index.json", path)
    try:
        return Part(stem, tuple(entries_from_json(document["entries"])), records_in(document))
    except (KeyError, TypeError, ValueError) as error:
        raise damage_error(path, f"{stem}.index.json cannot be read: {type(error).__name__}: {error}") from error


def parse_document(content: bytes, name: str, path: str) -> dict[str, Any]:
    """Return the content of a document.

    Raises:
        CheckpointError: the document is damaged or incomplete, or has another format.
    """
    if not has_valid_checksum(content):
        raise damage_error(path, f"the checksum of {name} does not match")
    document = parse_json(content)
    if not isinstance(document, dict) or document.get("format") != FORMAT_VERSION:
        raise CheckpointError(
            f"The predictions {path!r} have another format.",
            f"this version of drivetrain reads format {FORMAT_VERSION}.",
            "read the predictions with the version of drivetrain that wrote them.",
        )
    return document


def records_in(document: Mapping[str, Any]) -> dict[str, FileRecord]:
    """Return the file records in a document."""
    return {
        str(name): FileRecord(int(record["size"]), str(record["crc32"]), str(record.get("sha256", "")))
        for name, record in document["files"].items()
    }


def entries_to_json(entries: Sequence[Entry]) -> list[list[Any]]:
    """Return entries as JSON-able lists. The runs of an entry become one flat list of numbers."""
    return [
        [
            entry.loader,
            entry.batch,
            entry.rank,
            entry.samples,
            None if entry.runs is None else list(chain.from_iterable(entry.runs)),
        ]
        for entry in entries
    ]


def entries_from_json(entries: Any) -> Iterator[Entry]:
    """Yield the entries that `entries_to_json` returned.

    Raises:
        TypeError: the value has another structure.
        ValueError: the value has another structure, or its numbers are inconsistent.
    """
    for loader, batch, rank, samples, flat_runs in entries:
        if not all(type(number) is int and number >= 0 for number in (loader, batch, rank, samples)):
            raise ValueError(f"the entry {(loader, batch, rank, samples)} has an invalid number")
        runs = None if flat_runs is None else tuple(zip(flat_runs[::2], flat_runs[1::2], strict=True))
        if runs is not None and sum(count for _, count in runs) != samples:
            raise ValueError(f"an entry has {sum(count for _, count in runs)} indices and {samples} samples")
        yield Entry(loader, batch, rank, samples, runs)


def index_runs(indices: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the runs of consecutive indices, each with its first index and its length."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and index == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((index, 1))
    return tuple(runs)


def as_integer_indices(indices: Sequence[Any] | None) -> tuple[int, ...] | None:
    """Return a batch's indices as integers; None if they are unknown or not integers."""
    if indices is None:
        return None
    try:
        return tuple(operator.index(index) for index in indices)
    except TypeError:
        return None


@contextmanager
def describe_errors_as_predictions(path: str) -> Iterator[None]:
    """Context manager that rewords checkpoint errors so that they describe predictions."""
    try:
        yield
    except CheckpointError as error:
        what = error.what
        for checkpoint_text, predictions_text in (
            (f"The checkpoint {path!r} is damaged", f"The predictions {path!r} are damaged"),
            (f"The checkpoint {path!r}", f"The predictions {path!r}"),
            ("There is no checkpoint at", "There are no predictions at"),
            (f"{path!r} is not a checkpoint", f"{path!r} contains no predictions"),
        ):
            if what.startswith(checkpoint_text):
                what = what.replace(checkpoint_text, predictions_text, 1)
        if what == error.what:
            raise
        is_storage_error = isinstance(error, StorageError)
        fix = (
            error.fix
            if is_storage_error
            else "check the path; damaged predictions can be written again, to another path."
        )
        raise type(error)(
            what,
            error.why if is_storage_error else error.why.replace("a checkpoint is", "predictions are stored in"),
            fix,
        ) from error
