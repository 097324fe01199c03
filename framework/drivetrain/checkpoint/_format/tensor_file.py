"""The safetensors format, as far as a stream needs it: a header with every tensor's place, then their bytes.

https://huggingface.co/docs/safetensors/index#format . The library writes a file from tensors that are all there; here
they come one after the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.errors import CheckpointError

LONGEST_HEADER = 100_000_000  # bytes, the library's own limit
_ALIGNMENT = 64  # bytes; where the first tensor begins

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
    places: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for spec in specs:
        end = begin + spec.nbytes
        places[spec.name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(places, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_header(name: str, size: int, read: Callable[[int, int], bytes | memoryview]) -> dict[str, Entry]:
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
        if not 0 < length <= min(size - 8, LONGEST_HEADER):
            raise ValueError(f"its header is said to take {length} bytes of {size}")
        places = json.loads(bytes(read(8, 8 + length)), object_pairs_hook=_without_repeats)
        if not isinstance(places, dict):
            raise ValueError("its header is no JSON object")
        places.pop("__metadata__", None)
        return {key: _entry(key, place, 8 + length, size) for key, place in places.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
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


def _entry(name: str, place: Any, data: int, size: int) -> Entry:
    if place["dtype"] not in DTYPES:
        raise ValueError(f"{name!r} is of the unknown type {place['dtype']!r}")
    shape, (begin, end) = tuple(place["shape"]), place["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"{name!r} has shape {shape} at {begin} to {end}")
    entry = Entry(name, DTYPES[place["dtype"]], shape, data + begin, data + end)
    if entry.end > size or entry.end - entry.begin != entry.nbytes:
        raise ValueError(f"{name!r}, {entry.nbytes} bytes, lies at {entry.begin} to {entry.end} of {size}")
    return entry
