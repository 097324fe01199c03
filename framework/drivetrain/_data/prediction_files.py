"""The file format of written predictions: parts, and a manifest that commits the parts.

A part is one safetensors file, which ends with its own checksum. docs/predictions.md describes the format.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain._format.checksums import BLOCK, crc32
from drivetrain._format.documents import dump_with_checksum, has_valid_checksum, parse_json
from drivetrain._format.manifest import FileRecord, record_as_json, versions
from drivetrain._format.tensor_file import bytes_of, header_of, in_file_order, specs_of
from drivetrain._format.tensor_reader import CheckedFile, damage_error, tensors_in
from drivetrain.errors import CheckpointError

Content = bytes | memoryview

FORMAT_VERSION = 2
MANIFEST = "predictions.json"
LOCK = "writing.lock"
MAX_MANIFEST_BYTES = 2**28

OUTPUTS = "outputs"
"""The tensor in a part that holds its outputs as JSON text. All other tensors of outputs have names with a number."""
_SAMPLES, _INDICES, _CHECKSUM = "samples", "indices", "crc32"
_CHECKSUM_BYTES = 4

_PART = re.compile(r"part-(\d+)-(\d{5,})-(\d{8,})\.safetensors")
_PREDICTION_FILE = re.compile(rf"\.?({_PART.pattern}|{MANIFEST})(-[0-9a-f]+)?")


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A file that stores the outputs of consecutive micro-batches.

    Attributes:
        loader: the number of the loader.
        rank: the data rank.
        batch: the number, on the rank, of the first micro-batch.
    """

    loader: int
    rank: int
    batch: int

    @property
    def name(self) -> str:
        return f"part-{self.loader}-{self.rank:05d}-{self.batch:08d}.safetensors"


class PartSamples(NamedTuple):
    """The samples of the outputs in a part.

    Attributes:
        ends: for each output, the number of the part's samples up to the output's end.
        indices: the data-set index of each sample; None if samples have no indices.
    """

    ends: list[int]
    indices: Tensor | None

    def indices_of(self, number: int) -> Tensor | None:
        """Return the data-set indices of an output's samples."""
        begin = self.ends[number - 1] if number else 0
        return None if self.indices is None else self.indices[begin : self.ends[number]]


def is_prediction_file(name: str) -> bool:
    """Return whether a file name belongs to written predictions."""
    return name == LOCK or _PREDICTION_FILE.fullmatch(name) is not None


def parts_among(names: Sequence[str]) -> list[Part]:
    """Return the parts among files, ordered by loader, rank and micro-batch."""
    return sorted(Part(*map(int, match.groups())) for name in names if (match := _PART.fullmatch(name)))


# Parts


def part_contents(
    samples: Sequence[int], indices: Sequence[int] | None, outputs: Sequence[bytes], tensors: Mapping[str, Tensor]
) -> list[Content]:
    """Return the content of a part's file, in pieces.

    Args:
        samples: the number of samples of each output.
        indices: the data-set indices of all samples; None if samples have no indices.
        outputs: each output as JSON, which refers to the tensors.
        tensors: the tensors of all outputs.
    """
    text = bytearray(b"[" + b",\n".join(outputs) + b"]\n")
    stored = {_SAMPLES: torch.tensor(samples)}
    if indices is not None:
        stored[_INDICES] = torch.tensor(indices, dtype=torch.int64)
    stored |= tensors
    stored[OUTPUTS] = torch.frombuffer(text, dtype=torch.uint8)
    stored[_CHECKSUM] = torch.zeros(_CHECKSUM_BYTES, dtype=torch.uint8)  # last in the file, as one of its narrowest
    specs = in_file_order(specs_of(stored))
    flat = [stored[spec.name].resolve_conj().resolve_neg().reshape(-1) for spec in specs[:-1]]
    contents: list[Content] = [header_of(specs), *map(bytes_of, flat)]
    checksum = 0
    for content in contents:
        checksum = crc32(content, checksum)
    return [*contents, checksum.to_bytes(_CHECKSUM_BYTES, "little")]


def is_whole_part(content: memoryview) -> bool:
    """Return whether a file's content is that of a part, without any change."""
    end = len(content) - _CHECKSUM_BYTES
    return end > 0 and crc32(content[:end]) == int.from_bytes(content[end:], "little")


def samples_in_part(file: CheckedFile, path: str) -> PartSamples:
    """Read which samples a part stores.

    Raises:
        CheckpointError: the file is damaged, or is no part.
    """
    tensors = tensors_in(file)
    if _SAMPLES not in tensors or OUTPUTS not in tensors:
        raise damage_error(path, f"{file.name} holds no predictions")
    ends = list(accumulate(tensors[_SAMPLES].read().tolist()))
    return PartSamples(ends, tensors[_INDICES].read() if _INDICES in tensors else None)


# The manifest


def encode_manifest(identity: Mapping[str, Any], files: Mapping[str, FileRecord] | None = None) -> bytes:
    """Return the content of the manifest.

    Args:
        identity: a description of the weights, module, data, batches and ranks.
        files: the records of all parts' files, by name, which commits the parts; None while parts are being written.
    """
    document = {"format": FORMAT_VERSION, "identity": dict(identity), "versions": versions(), "block_size": BLOCK}
    return dump_with_checksum(document if files is None else {**document, "files": records_to_json(files)})


def parse_manifest(content: bytes, path: str) -> dict[str, Any]:
    """Return the content of the manifest, which has "files" if the predictions are complete.

    Raises:
        CheckpointError: the manifest is damaged, or has another format.
    """
    if not has_valid_checksum(content):
        raise damage_error(path, f"the checksum of {MANIFEST} does not match")
    document = parse_json(content)
    if not isinstance(document, dict) or document.get("format") != FORMAT_VERSION:
        raise CheckpointError(
            f"The predictions {path!r} have another format.",
            f"this version of drivetrain reads format {FORMAT_VERSION}.",
            "read the predictions with the version of drivetrain that wrote them.",
        )
    return document


def records_to_json(records: Mapping[str, FileRecord]) -> dict[str, Any]:
    """Return file records as JSON-able values."""
    return {name: record_as_json(record) for name, record in records.items()}


def records_from_json(records: Mapping[str, Any]) -> dict[str, FileRecord]:
    """Return the file records that `records_to_json` returned as JSON-able values."""
    return {name: FileRecord(int(record["size"]), str(record["crc32"])) for name, record in records.items()}


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
    """Context manager that turns errors about a checkpoint into errors about predictions."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(
            f"The predictions {path!r} cannot be read: {error.what.replace('The checkpoint ', 'The folder ')}",
            error.why,
            "check the path; damaged predictions can be written again, to another path.",
        ) from error
