"""Values as JSON that comes back equal, with tensors set aside. No pickle: reading one can run no code."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from drivetrain._distributed.shards import ParameterShard
from drivetrain.errors import CheckpointError

# A dict with a single key of these stands for what JSON cannot say. A dict of the user's with a key that begins with
# "$" is written as pairs, so that the two are never mistaken for each other.
TENSOR, TUPLE, FLOAT, PAIRS, COUNTER = "$tensor", "$tuple", "$float", "$pairs", "$counter"


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
            f"A checkpoint cannot hold {'/'.join(where) or 'this state'!r}: it is nested without end.",
            "a value that holds itself cannot be written as JSON.",
            "save a copy without the loop.",
        ) from None


def _encode(value: Any, aside: dict[str, Any], where: tuple[str, ...]) -> Any:
    if isinstance(value, torch.Tensor | ParameterShard):
        name = _free_name("/".join(where) or "tensor", aside)
        aside[name] = value
        return {TENSOR: name}
    # Subclasses of these (a NumPy float64, a str Enum) come back as the plain value, which equals them.
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
    while free in taken:
        number += 1
        free = f"{name}~{number}"
    return free


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """Return what `encode` was given; ``tensor`` finds by name what was set aside."""
    if isinstance(value, list):
        return [decode(part, tensor) for part in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((mark, content),) = value.items()
        if mark == TENSOR:
            return tensor(content)
        if mark == FLOAT:
            return float(content)
        if mark == TUPLE:
            return tuple(decode(part, tensor) for part in content)
        if mark == PAIRS:
            return {decode(key, tensor): decode(part, tensor) for key, part in content}
        if mark == COUNTER:
            return Counter({decode(key, tensor): decode(part, tensor) for key, part in content})
    return {key: decode(part, tensor) for key, part in value.items()}


def dumps(document: Any) -> bytes:
    """Return an encoded document as text, a line for each of its values."""
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()


def loads(content: bytes | bytearray | memoryview, name: str) -> Any:
    """Return a document from its text, not decoded yet.

    Raises:
        CheckpointError: it is no JSON.
    """
    try:
        return json.loads(bytes(content))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{name} is no JSON: {error}.",
            "a checkpoint's documents are JSON.",
            "take another checkpoint; this one is damaged or of another kind.",
        ) from error
