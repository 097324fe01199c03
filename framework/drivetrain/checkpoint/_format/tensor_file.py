"""The safetensors format, as far as a stream needs it: a header with every tensor's place, then their bytes.

https://huggingface.co/docs/safetensors/index#format . The library writes a file from tensors that are all there; here
they come one after the other.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.checkpoint._format.documents import METADATA, parse_json
from drivetrain.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # bytes, the library's own limit
_ALIGNMENT = 64  # bytes; where the first tensor begins
_MAX_COUNT = 2**63 - 1  # what a number of elements, bytes or a dimension of a tensor may be
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
    """What is known of a tensor before its values are."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Entry(Spec):
    """A tensor in a file: its bytes go from ``begin`` to before ``end``."""

    begin: int
    end: int


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raises:
    CheckpointError: a tensor that safetensors cannot hold, by name.
    """
    if name.rpartition(": ")[2] == METADATA:
        raise CheckpointError(
            f"A checkpoint cannot hold a tensor that is called {METADATA!r}.",
            "the header of a safetensors file has a key of that name for something else.",
            "give the parameter or buffer another name.",
        )
    if tensor.dtype not in NAMES:
        problem = f"of dtype {tensor.dtype}"
    elif tensor.layout != torch.strided:
        problem = f"of layout {tensor.layout}"
    elif tensor.device.type == "meta":
        problem = "without storage (on the meta device)"
    else:
        return
    raise CheckpointError(
        f"A checkpoint cannot hold {name!r}, a tensor {problem}.",
        "tensors are stored as safetensors, which knows dense tensors of these types: " + ", ".join(DTYPES) + ".",
        "store it in another form, a pair of real numbers for a complex one, say, or leave it out.",
    )


def in_file_order(specs: Iterable[Spec]) -> list[Spec]:
    """Return ``specs`` with wide elements first, so that each tensor is aligned to its own."""
    return sorted(specs, key=lambda spec: -spec.dtype.itemsize)


def header_of(specs: Sequence[Spec]) -> bytes:
    """Return the beginning of a file that holds ``specs``, in that order, with nothing in between."""
    # Joined from texts: a dict and two lists for each of many tensors cost the garbage collector more than the rest.
    places = [f'"{METADATA}":{{"format":"pt"}}']
    begin = 0
    for spec in specs:
        end = begin + spec.nbytes
        shape = ",".join(map(str, spec.shape))
        places.append(
            f'{json.dumps(spec.name)}:{{"dtype":"{NAMES[spec.dtype]}","shape":[{shape}],"data_offsets":[{begin},{end}]}}'
        )
        begin = end
    text = f"{{{','.join(places)}}}".encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_header(name: str, size: int, read: Callable[[int, int], bytes | bytearray]) -> dict[str, Entry]:
    """Return what a file holds, by name.

    Args:
        name: of the file, for the error.
        size: of the file in bytes.
        read: gives the bytes from one offset to before another.

    Raises:
        CheckpointError: this is no safetensors file, or its header points outside of it.
    """
    try:
        if size < 8:
            raise ValueError(f"it has {size} bytes")
        length = int.from_bytes(read(0, 8), "little")
        if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"its header is said to take {length} bytes of {size}")
        places = parse_json(bytes(read(8, 8 + length)), _without_repeats)
        if not isinstance(places, dict):
            raise ValueError("its header is no JSON object")
        _check_metadata(places.pop(METADATA, {}))
        entries = {key: _entry(key, place, 8 + length, size) for key, place in places.items()}
        _check_contiguous(entries.values(), 8 + length, size)
        return entries
    except ValueError as error:
        raise CheckpointError(
            f"{name} is no safetensors file: {error}.",
            "its header must be JSON that gives each tensor a place within the file.",
            "take another checkpoint; this one is damaged or of another kind.",
        ) from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in its header twice")
    return found


def _check_metadata(said: Any) -> None:
    if not isinstance(said, dict) or not all(isinstance(text, str) for text in said.values()):
        raise ValueError(f"{METADATA} is {reprlib.repr(said)}, and must be texts")


def _entry(name: str, place: Any, data: int, size: int) -> Entry:
    if not isinstance(place, dict) or place.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{_brief(name)} is described by {reprlib.repr(place)}")
    dtype, shape, offsets = place["dtype"], place["shape"], place["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{_brief(name)} is of the unknown type {reprlib.repr(dtype)}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"{_brief(name)} has shape {reprlib.repr(shape)} at {reprlib.repr(offsets)}")
    # With no dimension taken for zero, since strides are computed so.
    if math.prod(max(length, 1) for length in shape) * DTYPES[dtype].itemsize > _MAX_COUNT:
        raise ValueError(f"{_brief(name)} has shape {reprlib.repr(shape)}, which no tensor can have")
    entry = Entry(name, DTYPES[dtype], tuple(shape), data + offsets[0], data + offsets[1])
    if entry.end > size or entry.end - entry.begin != entry.nbytes:
        raise ValueError(f"{_brief(name)}, {entry.nbytes} bytes, lies at {entry.begin} to {entry.end} of {size}")
    return entry


def _are_counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and 0 <= number <= _MAX_COUNT for number in numbers)


def _check_contiguous(entries: Iterable[Entry], begin: int, size: int) -> None:
    """Refuse tensors that share bytes, and bytes that are no tensor's: the format knows neither."""
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != begin:
            how = "overlaps the one before" if entry.begin < begin else f"leaves out {entry.begin - begin} bytes"
            raise ValueError(f"{_brief(entry.name)}, which begins at byte {entry.begin}, {how}")
        begin = entry.end
    if begin != size:
        raise ValueError(f"the {size - begin} bytes from {begin} on are no tensor's")


def _brief(name: str) -> str:
    return reprlib.repr(name)


def misaligned(entries: Iterable[Entry]) -> Entry | None:
    """Return a tensor that begins where its elements may not lie in memory: a reader that maps the file fails."""
    return next((entry for entry in entries if entry.begin % entry.dtype.itemsize), None)
