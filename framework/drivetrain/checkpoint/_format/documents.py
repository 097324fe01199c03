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
LONGEST_DOCUMENT = 2**28
"""Bytes of a JSON document: long lists of numbers are better kept as tensors."""
DEEPEST = 100
"""Levels of lists, tuples and dicts in each other that a value may have."""
_DEEPEST_READ = DEEPEST + 4  # `encode` may be given what lies a level or two within a document
_MOST_BITS = 4300 * 3  # of an integer: its limit of 4,300 digits, `sys.int_info.default_max_str_digits`
_MOST_VALUES = 2**25  # of lists and dicts in one document; each takes some sixty bytes of memory


def encode(value: Any, aside: dict[str, Any], *where: str) -> Any:
    """Return ``value`` as what `json.dumps` takes and `decode` turns back into its equal.

    Args:
        value: nested dicts, lists and tuples of numbers, strings, booleans, None and tensors (or `ParameterShard`).
        aside: tensors are put here by a name made of the keys on the way to them, joined by "/".
        where: the keys on the way to ``value``.

    Raises:
        CheckpointError: names a value that is nothing of this.
    """
    try:
        return _encode(value, aside, where)
    except RecursionError:
        raise CheckpointError(
            f"A checkpoint cannot hold {'/'.join(where[:1]) or 'this state'!r}: it is nested without end, or deeper "
            f"than {DEEPEST} levels.",
            "a value that holds itself cannot be written as JSON, and one that is deeper is not read.",
            "save a copy without the loop.",
        ) from None


def _encode(value: Any, aside: dict[str, Any], where: tuple[str, ...]) -> Any:
    if len(where) > DEEPEST:
        raise RecursionError
    if isinstance(value, torch.Tensor | ParameterShard):
        name = _free_name("/".join(where) or "tensor", aside)
        aside[name] = value
        return {TENSOR: name}
    # Subclasses of these (a NumPy float64, a str Enum) come back as the plain value, which equals them.
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise CheckpointError(
            f"A checkpoint cannot hold {'/'.join(where) or 'this state'!r}, an integer of {value.bit_length()} bits.",
            f"Python reads and writes no more than some {_MOST_BITS} as text.",
            "save it as a str of its digits in base 16, or as bytes in a tensor.",
        )
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {FLOAT: repr(float(value))}
    if isinstance(value, list):
        return [_encode(part, aside, (*where, str(index))) for index, part in enumerate(value)]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {TUPLE: [_encode(part, aside, (*where, str(index))) for index, part in enumerate(value)]}
    if isinstance(value, Counter):  # MultiStepLR keeps its milestones in one
        return {COUNTER: _pairs(value, aside, where)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {str(key): _encode(part, aside, (*where, key)) for key, part in value.items()}
        return {PAIRS: _pairs(value, aside, where)}
    raise CheckpointError(
        f"A checkpoint cannot hold {'/'.join(where) or 'this state'!r}, a {type(value).__name__}.",
        "it holds JSON-able values and tensors, so that loading one can run no code.",
        "save numbers, strings, lists, tuples, dicts or tensors.",
    )


def _pairs(value: Mapping[Any, Any], aside: dict[str, Any], where: tuple[str, ...]) -> list[Any]:
    return [
        [_encode(key, aside, (*where, "key")), _encode(part, aside, (*where, str(key)))] for key, part in value.items()
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
    if depth > _DEEPEST_READ:
        raise ValueError(f"it is nested deeper than {_DEEPEST_READ} levels")
    depth += 1
    if isinstance(value, list):
        return [decode(part, tensor, depth) for part in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((mark, content),) = value.items()
        if mark == TENSOR:
            return tensor(_of_type(str, mark, content))
        if mark == FLOAT:
            if _of_type(str, mark, content) not in _FLOATS:
                raise ValueError(f"{mark} of {reprlib.repr(content)}")
            return _FLOATS[content]
        if mark == TUPLE:
            return tuple([decode(part, tensor, depth) for part in _of_type(list, mark, content)])
        if mark in (PAIRS, COUNTER):
            pairs = {}
            for pair in _of_type(list, mark, content):
                if len(_of_type(list, mark, pair)) != 2:
                    raise ValueError(f"{mark} of {reprlib.repr(pair)}")
                pairs[_hashable(decode(pair[0], tensor, depth))] = decode(pair[1], tensor, depth)
            return Counter(pairs) if mark == COUNTER else pairs
    return {key: decode(part, tensor, depth) for key, part in value.items()}


def _of_type(kind: type, mark: str, content: Any) -> Any:
    if type(content) is not kind:
        raise ValueError(f"{mark} of {reprlib.repr(content)}")
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
    if len(text) > LONGEST_DOCUMENT or _too_many(text):
        raise CheckpointError(
            f"A checkpoint cannot hold a document of {len(text)} bytes of JSON.",
            f"what is no tensor may take {LONGEST_DOCUMENT} bytes and {_MOST_VALUES} values.",
            "keep long lists of numbers as tensors.",
        )
    return text


def parsed(content: bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return what JSON text says, with nothing that JSON does not know, and not too much of it.

    Args:
        content: the text.
        pairs: takes the keys and values of each object, as `json.loads` means it.

    Raises:
        ValueError: it is no JSON, or larger than anything that is written.
    """
    if _too_many(content):
        raise ValueError(f"it has more than {_MOST_VALUES} values")
    try:
        return json.loads(content, object_pairs_hook=pairs, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _too_many(content: bytes) -> bool:
    # What stands in a string counts too; fewer there are in no case.
    most = _MOST_VALUES
    return len(content) > most and content.count(b",") + content.count(b"[") + content.count(b"{") > most


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def loads(content: bytes | bytearray | memoryview, name: str) -> Any:
    """Return a document from its text, not decoded yet.

    Raises:
        CheckpointError: it is no JSON.
    """
    try:
        return parsed(bytes(content))
    except ValueError as error:
        raise CheckpointError(
            f"{name} is no JSON: {error}.",
            "a checkpoint's documents are JSON.",
            "take another checkpoint; this one is damaged or of another kind.",
        ) from error
