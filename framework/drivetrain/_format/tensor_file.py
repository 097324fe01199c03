"""Reads and writes headers of safetensors files.

A file has a header with the dtype, shape and byte offsets of each tensor, followed by the bytes of all tensors; see
https://huggingface.co/docs/safetensors/index#format . The safetensors library needs all tensors in memory; with this
module, tensors are written and read one at a time.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain._distributed.shards import ParameterShard
from drivetrain._format.documents import METADATA, parse_json
from drivetrain._runtime.transfer import row_major
from drivetrain.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's limit
_ALIGNMENT = 64  # alignment of the first tensor in bytes
_MAX_COUNT = 2**63 - 1  # maximum size of a dimension, number of elements and number of bytes
_MAX_DIMENSIONS = 64

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Spec:
    """Name, dtype, shape and size in bytes of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape with at least one dimension: a scalar is one row."""
        return self.shape or (1,)

    @property
    def row_size(self) -> int:
        """The number of elements of a row, which is one index of the first dimension."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class Entry(Spec):
    """A tensor in a file. Its bytes are at the offsets from ``begin`` up to ``end`` in the file."""

    begin: int
    end: int


def row_ranges(spec: Spec, limit: int) -> Iterator[tuple[int, int]]:
    """Split the rows of a tensor into ranges of at most ``limit`` bytes, or one row if a row is larger."""
    step = max(1, limit // max(1, spec.row_size * spec.dtype.itemsize))
    for first in range(0, spec.rows[0], step):
        yield first, min(first + step, spec.rows[0])


def bytes_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a flat CPU tensor."""
    return memoryview(row_major(flat).view(torch.uint8).numpy())  # type: ignore[arg-type]


def check_storable(values: Mapping[str, Any], part: str = "") -> list[Spec]:
    """Return the specs of tensors and shards, or raise if safetensors cannot store one of them.

    Args:
        values: the tensors and shards by name.
        part: the part of a checkpoint to which they belong, for the error.

    Raises:
        CheckpointError: a tensor has an unsupported name, class, dtype, layout or device.
    """
    for key, value in values.items():
        tensor = value.local if isinstance(value, ParameterShard) else value
        if key == METADATA:
            problem = f"named {METADATA!r}, which the header of a safetensors file reserves"
        # A tensor of a subclass that wraps others has no memory of its own that could be read.
        elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            problem = f"of class {type(tensor).__name__}, which wraps other tensors"
        elif tensor.dtype not in NAMES:
            problem = f"of dtype {tensor.dtype}"
        elif tensor.layout != torch.strided:
            problem = f"of layout {tensor.layout}"
        elif tensor.device.type == "meta":
            problem = "without storage (on the meta device)"
        else:
            continue
        raise CheckpointError(
            f"A checkpoint cannot hold {f'{part}: {key}' if part else key!r}, a tensor {problem}.",
            f"tensors are stored as safetensors, which supports dense tensors of these types: {', '.join(DTYPES)}.",
            "convert it, for example a complex tensor to pairs of real numbers, or leave it out. For the state of an "
            "optimizer, define __tensor_flatten__ and __tensor_unflatten__ in the class, as torch.compile requires.",
        )
    return specs_of(values)


def specs_of(values: Mapping[str, Any]) -> list[Spec]:
    """Return the specs of tensors, shards, or other values with a dtype and a shape."""
    return [
        Spec(name, value.dtype, shape := tuple(value.shape), math.prod(shape) * value.dtype.itemsize)
        for name, value in values.items()
    ]


def in_file_order(specs: Iterable[Spec]) -> list[Spec]:
    """Return ``specs`` with the widest elements first, so that each tensor is aligned to its element size."""
    return sorted(specs, key=lambda spec: -spec.dtype.itemsize)


def header_of(specs: Sequence[Spec]) -> bytes:
    """Return the header of a file that holds the tensors of ``specs`` contiguously, in the given order."""
    # The header is built from strings, because a dict and two lists for each tensor would slow down garbage collection.
    items = [f'"{METADATA}":{{"format":"pt"}}']
    begin = 0
    for spec in specs:
        end = begin + spec.nbytes
        shape = ",".join(map(str, spec.shape))
        items.append(
            f'{json.dumps(spec.name)}:{{"dtype":"{NAMES[spec.dtype]}","shape":[{shape}],"data_offsets":[{begin},{end}]}}'
        )
        begin = end
    text = f"{{{','.join(items)}}}".encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_header(name: str, size: int, read: Callable[[int, int], bytes | bytearray]) -> dict[str, Entry]:
    """Return the tensors of a file by name.

    Args:
        name: name of the file, for the error.
        size: size of the file in bytes.
        read: returns the bytes from one offset up to another.

    Raises:
        CheckpointError: the file is not a safetensors file, or its header points outside the file.
    """
    try:
        if size < 8:
            raise ValueError(f"it has {size} bytes")
        length = int.from_bytes(read(0, 8), "little")
        if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"its header claims to have {length} of {size} bytes")
        descriptions = parse_json(bytes(read(8, 8 + length)), _reject_duplicates)
        if not isinstance(descriptions, dict):
            raise ValueError("its header is not a JSON object")
        _check_metadata(descriptions.pop(METADATA, {}))
        entries = {key: _entry(key, description, 8 + length, size) for key, description in descriptions.items()}
        _check_contiguous(entries.values(), 8 + length, size)
        return entries
    except ValueError as error:
        raise CheckpointError(
            f"{name} is not a safetensors file: {error}.",
            "its header must be JSON that gives each tensor's offsets within the file.",
            "use another checkpoint; this one is damaged or has another format.",
        ) from error


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("its header has a name twice")
    return unique


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError(f"{METADATA} is {reprlib.repr(metadata)}, and must map names to strings")


def _entry(name: str, description: Any, data: int, size: int) -> Entry:
    if not isinstance(description, dict) or description.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{reprlib.repr(name)} is described by {reprlib.repr(description)}")
    dtype, shape, offsets = description["dtype"], description["shape"], description["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{reprlib.repr(name)} has the unknown dtype {reprlib.repr(dtype)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"{reprlib.repr(name)} has shape {reprlib.repr(shape)} at {reprlib.repr(offsets)}")
    # A dimension of size 0 counts as 1 here, as in torch's computation of strides.
    if math.prod(max(length, 1) for length in shape) * DTYPES[dtype].itemsize > _MAX_COUNT:
        raise ValueError(f"{reprlib.repr(name)} has shape {reprlib.repr(shape)}, which no tensor can have")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    entry = Entry(name, DTYPES[dtype], tuple(shape), nbytes, data + offsets[0], data + offsets[1])
    if entry.end > size or entry.end - entry.begin != entry.nbytes:
        raise ValueError(
            f"{reprlib.repr(name)}, {entry.nbytes} bytes, is at offsets {entry.begin} to {entry.end} of {size}"
        )
    return entry


def _are_counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and 0 <= number <= _MAX_COUNT for number in numbers)


def _check_contiguous(entries: Iterable[Entry], begin: int, size: int) -> None:
    """Reject tensors that overlap, and gaps between tensors, which the format does not allow."""
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != begin:
            raise ValueError(f"{reprlib.repr(entry.name)} begins at byte {entry.begin}, and not at byte {begin}")
        begin = entry.end
    if begin != size:
        raise ValueError(f"the {size - begin} bytes from {begin} on belong to no tensor")


def misaligned(entries: Iterable[Entry]) -> Entry | None:
    """Return a tensor whose offset is not a multiple of its element size; None if there is none.

    Readers that map a file into memory reject such a tensor.
    """
    return next((entry for entry in entries if entry.begin % entry.dtype.itemsize), None)
