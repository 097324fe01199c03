"""Encodes values as JSON, with tensors kept separate. Unlike unpickling, decoding runs no code from the file."""

from __future__ import annotations

import json
import math
import re
import reprlib
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from drivetrain._distributed.shards import ParameterShard
from drivetrain._format.flattened_tensor import FlattenedTensor, is_flattenable
from drivetrain.errors import CheckpointError

# A dict with one of the following keys as its only key encodes a value that JSON cannot represent. A user's dict with a
# key that begins with "$" is written as pairs, so that the user's dict is not mistaken for such an encoding.
TENSOR, TUPLE, FLOAT, PAIRS, COUNTER = "$tensor", "$tuple", "$float", "$pairs", "$counter"
SUBCLASS, DTYPE = "$subclass", "$dtype"
METADATA = "__metadata__"
"""A key that the header of a safetensors file reserves, so that no tensor can have this name."""

# Limits of a document, which `encode` and `dumps` enforce. A reader rejects a document that exceeds them before the
# document takes much memory.
MAX_DOCUMENT_BYTES = 2**28
"""Maximum size of a JSON document; long lists of numbers should be stored as tensors."""
MAX_DEPTH = 100
"""Maximum nesting of lists, tuples and dicts."""
_MAX_READ_DEPTH = MAX_DEPTH + 4  # a value passed to `encode` is nested one or two levels deep in a document
_MAX_VALUES = 2**25  # maximum number of values in a document; a value takes about sixty bytes of memory

_CHECKSUM_END = re.compile(rb',\n "crc32": "([0-9a-f]{8})"\n}\n\Z')


def encode(value: Any, tensors: dict[str, Any], *path: str) -> Any:
    """Return ``value`` as JSON-able data that `decode` turns back into an equal value.

    Args:
        value: nested dicts, lists and tuples of numbers, strings, booleans, None, dtypes and tensors (or
            `ParameterShard`).
        tensors: receives the tensors. A tensor's name consists of the keys on the path to it, joined by "/".
        path: the keys on the path to ``value``.

    Raises:
        CheckpointError: a value has an unsupported type; the message names the value.
    """
    if len(path) > MAX_DEPTH:
        raise CheckpointError(
            f"A checkpoint cannot hold {path[0]!r}: it contains itself, or is nested deeper than {MAX_DEPTH} levels.",
            "JSON cannot represent a value that contains itself, and deeper nesting is not supported.",
            "save a copy that does not contain itself, or a value with less nesting.",
        )
    # An instance of a subclass (a NumPy float64, a str Enum) is restored as an equal value of the built-in type.
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {FLOAT: repr(float(value))}
    if isinstance(value, torch.Tensor) and type(value) is not torch.Tensor and is_flattenable(value):
        flat = FlattenedTensor.of(value)
        encoded = {name: encode(tensor, tensors, *path, name) for name, tensor in flat.tensors.items()}
        context = encode(flat.context, tensors, *path, "context")
        return {SUBCLASS: [flat.class_name, encoded, context, list(flat.shape), list(flat.stride)]}
    if isinstance(value, torch.Tensor | ParameterShard):
        name = _unused_name("/".join(path) or "tensor", tensors)
        tensors[name] = value
        return {TENSOR: name}
    if isinstance(value, list):
        return [encode(part, tensors, *path, str(index)) for index, part in enumerate(value)]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {TUPLE: [encode(part, tensors, *path, str(index)) for index, part in enumerate(value)]}
    if isinstance(value, Counter):  # MultiStepLR stores its milestones in a Counter
        return {COUNTER: _encode_pairs(value, tensors, path)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {str(key): encode(part, tensors, *path, key) for key, part in value.items()}
        return {PAIRS: _encode_pairs(value, tensors, path)}
    if isinstance(value, torch.dtype):  # an argument of a tensor subclass
        return {DTYPE: str(value).removeprefix("torch.")}
    raise CheckpointError(
        f"A checkpoint cannot hold {'/'.join(path) or 'this state'!r}, a {type(value).__name__}.",
        "a checkpoint holds only JSON-able values and tensors, so that loading a checkpoint runs no code.",
        "save numbers, strings, lists, tuples, dicts or tensors.",
    )


def _encode_pairs(value: Mapping[Any, Any], tensors: dict[str, Any], path: tuple[str, ...]) -> list[Any]:
    return [[encode(key, tensors, *path, "key"), encode(part, tensors, *path, str(key))] for key, part in value.items()]


def _unused_name(name: str, taken: Mapping[str, Any]) -> str:
    number, free = 1, name
    while free in taken or free == METADATA:
        number += 1
        free = f"{name}~{number}"
    return free


def decode(value: Any, tensor: Callable[[str], Any], depth: int = 0) -> Any:
    """Return the value that was passed to `encode`. ``tensor`` is called with a name and returns the tensor.

    Raises:
        AttributeError, TypeError, ValueError: ``value`` is not a result of `encode`, or is nested too deeply.
        KeyError: ``tensor`` does not know a name, and raised this error.
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
            return tensor(content)
        if tag == FLOAT:
            return float(content)
        if tag == DTYPE:
            return _dtype(content)
        if tag == SUBCLASS:
            return _flattened(content, tensor, depth)
        if tag == TUPLE:
            return tuple([decode(part, tensor, depth) for part in content])
        if tag in (PAIRS, COUNTER):
            pairs = {decode(key, tensor, depth): decode(part, tensor, depth) for key, part in content}
            return Counter(pairs) if tag == COUNTER else pairs
    return {key: decode(part, tensor, depth) for key, part in value.items()}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{DTYPE} has the content {reprlib.repr(name)}")
    return dtype


def _flattened(content: Any, tensor: Callable[[str], Any], depth: int) -> FlattenedTensor:
    class_name, encoded, context, shape, stride = content
    tensors = {name: decode(value, tensor, depth) for name, value in encoded.items()}
    return FlattenedTensor(str(class_name), tensors, decode(context, tensor, depth), tuple(shape), tuple(stride))


def dumps(document: Any) -> bytes:
    """Return an encoded document as JSON text.

    Raises:
        CheckpointError: the text would be too long for `loads`.
    """
    text = (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()
    if len(text) > MAX_DOCUMENT_BYTES or _has_too_many_values(text):
        raise CheckpointError(
            f"A checkpoint cannot hold a document of {len(text)} bytes of JSON.",
            f"values other than tensors may take {MAX_DOCUMENT_BYTES} bytes and {_MAX_VALUES} values.",
            "save long lists of numbers as tensors.",
        )
    return text


def parse_json(content: bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value of JSON text; NaN, infinities and texts with too many values are rejected.

    Args:
        content: the text.
        pairs: the ``object_pairs_hook`` for `json.loads`.

    Raises:
        ValueError: the text is not JSON, or exceeds the limits of `dumps`.
    """
    if _has_too_many_values(content):
        raise ValueError(f"it has more than {_MAX_VALUES} values")
    try:
        return json.loads(content, object_pairs_hook=pairs, parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _has_too_many_values(content: bytes) -> bool:
    # The count is an upper bound, because it includes commas and brackets inside strings.
    limit = _MAX_VALUES
    return len(content) > limit and content.count(b",") + content.count(b"[") + content.count(b"{") > limit


def _reject_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def loads(content: bytes | bytearray | memoryview, name: str) -> Any:
    """Parse the JSON text of a document, without decoding it.

    Raises:
        CheckpointError: the text is not JSON.
    """
    try:
        return parse_json(bytes(content))
    except ValueError as error:
        raise CheckpointError(
            f"{name} is not JSON: {error}.",
            "a checkpoint's documents are JSON.",
            "use another checkpoint; this one is damaged or has another format.",
        ) from error


# Documents that end with a checksum of their content, so that a truncated one is detected


def dump_with_checksum(document: dict[str, Any]) -> bytes:
    """Return a JSON-able document as text that ends with its checksum."""
    body = json.dumps(document, indent=1, allow_nan=False).encode().removesuffix(b"\n}")
    return body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode()


def has_valid_checksum(content: bytes) -> bool:
    """Return whether a text ends with the checksum of its content, as `dump_with_checksum` writes it."""
    end = _CHECKSUM_END.search(content)
    return end is not None and int(end[1], 16) == zlib.crc32(content[: end.start()])
