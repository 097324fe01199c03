"""What written predictions consist of: a document that says of what they are, parts, and a manifest that commits them.

A part is three files: tensors as safetensors, what is no tensor as JSON, and an index that is written last, says whose
outputs they are, and makes the part count. docs/predictions.md describes them.
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
from drivetrain.checkpoint._format.documents import parsed
from drivetrain.checkpoint._format.folder import StorageError
from drivetrain.checkpoint._format.manifest import FileRecord, record_as_json, versions
from drivetrain.checkpoint._format.sealed_json import is_sealed, sealed
from drivetrain.checkpoint._format.tensor_reader import damaged
from drivetrain.errors import CheckpointError

FORMAT = 1
START_DOCUMENT = "beginning.json"
MANIFEST = "predictions.json"
LOCK = "writing.lock"
MAX_DOCUMENT_BYTES = 2**28
"""Bytes of a document."""

_STEM = r"part-\d{5,}-\d{6,}-[0-9a-f]{16}"
_INDEX = re.compile(rf"({_STEM})\.index\.json")
_OURS = re.compile(
    rf"{_STEM}(\.index)?\.json|{_STEM}\.safetensors|\.?{MANIFEST}(-[0-9a-f]+)?|\.?{START_DOCUMENT}(-[0-9a-f]+)?"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """Whose output one is.

    Attributes:
        loader: which of the loaders.
        batch: which micro-batch of this loader's on the rank.
        rank: among those that get different data.
        samples: how many.
        runs: the indices of the samples in the data set, in the order of the output: of each run of consecutive ones
            the first and how many they are. None where samples have no indices.
    """

    loader: int
    batch: int
    rank: int
    samples: int
    runs: tuple[tuple[int, int], ...] | None


@dataclass(frozen=True, slots=True)
class Part:
    """Several outputs.

    Attributes:
        stem: of its files' names.
        entries: whose outputs they are.
        files: its tensors, if any, and what is no tensor, by name.
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
    """Whether a file name is one that written predictions may hold."""
    return name == LOCK or _OURS.fullmatch(name) is not None


def part_stems(names: Sequence[str]) -> list[str]:
    """Return the stems of the parts whose index is among the names of files."""
    return sorted(found[1] for name in names if (found := _INDEX.fullmatch(name)))


# Documents


def encode_start_document(identity: Mapping[str, Any]) -> bytes:
    """Return the document that says whose predictions of what these are going to be."""
    return sealed({"format": FORMAT, "identity": dict(identity)})


def manifest(identity: Mapping[str, Any], parts: Sequence[Part], indices: Mapping[str, FileRecord]) -> bytes:
    """Return what commits the parts.

    Args:
        identity: as in the beginning.
        parts: all of them.
        indices: the record of each part's index, by name.
    """
    records = {name: one for part in parts for name, one in part.files.items()} | dict(indices)
    return sealed(
        {
            "format": FORMAT,
            "identity": dict(identity),
            "versions": versions(),
            "block_size": BLOCK,
            "parts": [part.stem for part in parts],
            "files": {name: record_as_json(one) for name, one in records.items()},
        }
    )


def encode_part_index(part: Part) -> bytes:
    """Return a part's index."""
    return sealed(
        {
            "format": FORMAT,
            "entries": entries_to_json(part.entries),
            "files": {name: record_as_json(one) for name, one in part.files.items()},
        }
    )


def decode_part_index(stem: str, content: bytes, path: str) -> Part:
    """Return a part from its index.

    Raises:
        CheckpointError: it is damaged, or not whole.
    """
    document = parse_document(content, f"{stem}.index.json", path)
    try:
        return Part(stem, tuple(entries_from_json(document["entries"])), records_in(document))
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"{stem}.index.json cannot be read: {type(error).__name__}: {error}") from error


def parse_document(content: bytes, name: str, path: str) -> dict[str, Any]:
    """Return what one of the documents says.

    Raises:
        CheckpointError: it is damaged, or not whole, or of another format.
    """
    if not is_sealed(content):
        raise damaged(path, f"the checksum of {name} is another")
    document = parsed(content)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(
            f"The predictions {path!r} are of another format.",
            f"this version reads format {FORMAT}.",
            "read them with the version that wrote them.",
        )
    return document


def records_in(document: Mapping[str, Any]) -> dict[str, FileRecord]:
    """Return the records of files that a document holds."""
    return {
        str(name): FileRecord(int(one["size"]), str(one["crc32"]), str(one.get("sha256", "")))
        for name, one in document["files"].items()
    }


def entries_to_json(entries: Sequence[Entry]) -> list[list[Any]]:
    """Return entries as JSON has them, their runs as one list of numbers."""
    return [
        [
            one.loader,
            one.batch,
            one.rank,
            one.samples,
            None if one.runs is None else list(chain.from_iterable(one.runs)),
        ]
        for one in entries
    ]


def entries_from_json(said: Any) -> Iterator[Entry]:
    """Yield what `entries_to_json` was given.

    Raises:
        TypeError: it is nothing of the kind.
        ValueError: likewise.
    """
    for loader, batch, rank, samples, numbers in said:
        if not all(type(number) is int and number >= 0 for number in (loader, batch, rank, samples)):
            raise ValueError(f"an entry of {(loader, batch, rank, samples)}")
        runs = None if numbers is None else tuple(zip(numbers[::2], numbers[1::2], strict=True))
        if runs is not None and sum(count for _, count in runs) != samples:
            raise ValueError(f"{sum(count for _, count in runs)} indices of {samples} samples")
        yield Entry(loader, batch, rank, samples, runs)


def index_runs(indices: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return runs of consecutive indices, each by its first and how many they are."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and index == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((index, 1))
    return tuple(runs)


def as_integer_indices(indices: Sequence[Any] | None) -> tuple[int, ...] | None:
    """Return a batch's indices where they are whole numbers, by which samples can be put in order."""
    if indices is None:
        return None
    try:
        return tuple(operator.index(index) for index in indices)
    except TypeError:
        return None


@contextmanager
def describe_errors_as_predictions(path: str) -> Iterator[None]:
    """Within it, what the pieces of the checkpoint's format say of a checkpoint is said of predictions."""
    try:
        yield
    except CheckpointError as error:
        what = error.what
        for of_a_checkpoint, of_predictions in (
            (f"The checkpoint {path!r} is damaged", f"The predictions {path!r} are damaged"),
            (f"The checkpoint {path!r}", f"The predictions {path!r}"),
            ("There is no checkpoint at", "There are no predictions at"),
            (f"{path!r} is no checkpoint", f"{path!r} holds no predictions"),
        ):
            if what.startswith(of_a_checkpoint):
                what = what.replace(of_a_checkpoint, of_predictions, 1)
        if what == error.what:
            raise
        kept = isinstance(error, StorageError)
        fix = error.fix if kept else "check the path; what is damaged can be predicted anew, to another path."
        raise type(error)(what, error.why if kept else error.why.replace("a checkpoint", "it"), fix) from error
