"""Values as JSON that comes back equal, with tensors set aside. No pickle: reading one can run no code."""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from drivetrain._distributed.shards import ParameterShard
from drivetrain.errors import CheckpointError

# A dict with a single key of these stands for what JSON cannot say. A dict of the user's with a key that begins with
# "$" is written as pairs, so that the two are never mistaken for each other.
TENSOR, TUPLE, FLOAT, PAIRS, COUNTER = "$tensor", "$tuple", "$float", "$pairs", "$counter"
METADATA = "__metadata__"
"""No tensor can have this name in a safetensors file."""
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}

# What is written is within these bounds, and what is read beyond them is refused before it takes memory and time.
MAX_DOCUMENT_BYTES = 2**28
"""Bytes of a JSON document: long lists of numbers are better kept as tensors."""
MAX_DEPTH = 100
"""Levels of lists, tuples and dicts in each other that a value may have."""
_MAX_READ_DEPTH = MAX_DEPTH + 4  # `encode` may be given what lies a level or two within a document
_MAX_INTEGER_BITS = 4300 * 3  # of an integer: its limit of 4,300 digits, `sys.int_info.default_max_str_digits`
_MAX_VALUES = 2**25  # of lists and dicts in one document; each takes some sixty bytes of memory


def encode(value: Any, tensors: dict[str, Any], *path: str) -> Any:
    """Return ``value`` as what `json.dumps` takes and `decode` turns back into its equal.

    Args:
        value: nested dicts, lists and tuples of numbers, strings, booleans, None and tensors (or `ParameterShard`).
        aside: tensors are put here by a name made of the keys on the way to them, joined by "/".
        where: the keys on the way to ``value``.

    Raises:
        CheckpointError: names a value that is nothing of this.
    """
    try:
        return _encode(value, tensors, path)
    except RecursionError:
        raise CheckpointError(
            f"A checkpoint cannot hold {'/'.join(path[:1]) or 'this state'!r}: it is nested without end, or deeper "
            f"than {MAX_DEPTH} levels.",
            "a value that holds itself cannot be written as JSON, and one that is deeper is not read.",
            "save a copy without the loop.",
        ) from None


def _encode(value: Any, tensors: dict[str, Any], path: tuple[str, ...]) -> Any:
    if len(path) > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, torch.Tensor | ParameterShard):
        name = _free_name("/".join(path) or "tensor", tensors)
        tensors[name] = value
        return {TENSOR: name}
    # Subclasses of these (a NumPy float64, a str Enum) come back as the plain value, which equals them.
    if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
        raise CheckpointError(
            f"A checkpoint cannot hold {'/'.join(path) or 'this state'!r}, an integer of {value.bit_length()} bits.",
            f"Python reads and writes no more than some {_MAX_INTEGER_BITS} as text.",
            "save it as a str of its digits in base 16, or as bytes in a tensor.",
        )
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {FLOAT: repr(float(value))}
    if isinstance(value, list):
        return [_encode(part, tensors, (*path, str(index))) for index, part in enumerate(value)]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {TUPLE: [_encode(part, tensors, (*path, str(index))) for index, part in enumerate(value)]}
    if isinstance(value, Counter):  # MultiStepLR keeps its milestones in one
        return {COUNTER: _pairs(value, tensors, path)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {str(key): _encode(part, tensors, (*path, key)) for key, part in value.items()}
        return {PAIRS: _pairs(value, tensors, path)}
    raise CheckpointError(
        f"A checkpoint cannot hold {'/'.join(path) or 'this state'!r}, a {type(value).__name__}.",
        "it holds JSON-able values and tensors, so that loading one can run no code.",
        "save numbers, strings, lists, tuples, dicts or tensors.",
    )


def _pairs(value: Mapping[Any, Any], tensors: dict[str, Any], path: tuple[str, ...]) -> list[Any]:
    return [
        [_encode(key, tensors, (*path, "key")), _encode(part, tensors, (*path, str(key)))]
        for key, part in value.items()
    ]


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    number, free = 1, name
    while free in taken or free == METADATA:
        number += 1
        free = f"{name}~{number}"
    return free


def decode(value: Any, tensor: Callable[[str], Any], depth: int = 0) -> Any:
    """Return what `encode` was given; ``tensor`` finds by name what was set aside.

    Raises:
        ValueError: it is nothing that `encode` returns, or nested too deeply.
        KeyError: of ``tensor``.
    """
    if depth > _MAX_READ_DEPTH:
        raise ValueError(f"it is nested deeper than {_MAX_READ_DEPTH} levels")
    depth += 1
    if isinstance(value, list):
        return [decode(part, tensor, depth) for part in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag == TENSOR:
            return tensor(_of_type(str, tag, content))
        if tag == FLOAT:
            if _of_type(str, tag, content) not in _FLOATS:
                raise ValueError(f"{tag} of {reprlib.repr(content)}")
            return _FLOATS[content]
        if tag == TUPLE:
            return tuple([decode(part, tensor, depth) for part in _of_type(list, tag, content)])
        if tag in (PAIRS, COUNTER):
            pairs = {}
            for pair in _of_type(list, tag, content):
                if len(_of_type(list, tag, pair)) != 2:
                    raise ValueError(f"{tag} of {reprlib.repr(pair)}")
                pairs[_hashable(decode(pair[0], tensor, depth))] = decode(pair[1], tensor, depth)
            return Counter(pairs) if tag == COUNTER else pairs
    return {key: decode(part, tensor, depth) for key, part in value.items()}


def _of_type(kind: type, tag: str, content: Any) -> Any:
    if type(content) is not kind:
        raise ValueError(f"{tag} of {reprlib.repr(content)}")
    return content


def _hashable(key: Any) -> Any:
    try:
        hash(key)
    except TypeError:
        raise ValueError(f"the key {reprlib.repr(key)}") from None
    return key


def dumps(document: Any) -> bytes:
    """Return an encoded document as text, a line for each of its values.

    Raises:
        CheckpointError: it is too long to be read again.
    """
    text = (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()
    if len(text) > MAX_DOCUMENT_BYTES or _too_many(text):
        raise CheckpointError(
            f"A checkpoint cannot hold a document of {len(text)} bytes of JSON.",
            f"what is no tensor may take {MAX_DOCUMENT_BYTES} bytes and {_MAX_VALUES} values.",
            "keep long lists of numbers as tensors.",
        )
    return text


def parse_json(content: bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return what JSON text says, with nothing that JSON does not know, and not too much of it.

    Args:
        content: the text.
        pairs: takes the keys and values of each object, as `json.loads` means it.

    Raises:
        ValueError: it is no JSON, or larger than anything that is written.
    """
    if _too_many(content):
        raise ValueError(f"it has more than {_MAX_VALUES} values")
    try:
        return json.loads(content, object_pairs_hook=pairs, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _too_many(content: bytes) -> bool:
    # What stands in a string counts too; fewer there are in no case.
    most = _MAX_VALUES
    return len(content) > most and content.count(b",") + content.count(b"[") + content.count(b"{") > most


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def loads(content: bytes | bytearray | memoryview, name: str) -> Any:
    """Return a document from its text, not decoded yet.

    Raises:
        CheckpointError: it is no JSON.
    """
    try:
        return parse_json(bytes(content))
    except ValueError as error:
        raise CheckpointError(
            f"{name} is no JSON: {error}.",
            "a checkpoint's documents are JSON.",
            "take another checkpoint; this one is damaged or of another kind.",
        ) from error
