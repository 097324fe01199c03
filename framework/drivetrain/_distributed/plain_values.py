"""Encodes plain values for exchange between ranks, without pickle, so that decoding cannot run code."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

# A dict whose only key is one of these marks stands for a type that JSON lacks.
_TUPLE, _PAIRS = "$tuple", "$pairs"
_ATOMIC_TYPES = frozenset({str, int, float, bool, type(None)})


def encode(value: Any) -> bytes:
    """Return ``value`` as JSON that `decode` turns back into an equal value.

    Args:
        value: nested dicts, lists and tuples of numbers (including NaN and infinities), strings, booleans and None.
            Instances of subclasses of these types (a NamedTuple, an IntEnum) come back as the plain type.

    Raises:
        TypeError: a value has another type. The message names the type.
    """
    return json.dumps(_to_plain(value), separators=(",", ":")).encode()


def decode(content: bytes | bytearray) -> Any:
    """Return the value that was passed to `encode`."""
    return json.loads(content, object_hook=_from_plain)


def _to_plain(value: Any) -> Any:
    if isinstance(value, list):
        return _all_plain(value)
    if isinstance(value, tuple):
        return {_TUPLE: _all_plain(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(zip(value, _all_plain(value.values()), strict=True))
        return {_PAIRS: [_all_plain(pair) for pair in value.items()]}
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"ranks can only exchange plain values, not a {type(value).__name__}")


def _all_plain(values: Iterable[Any]) -> list[Any]:
    # Most values have a type in `_ATOMIC_TYPES`, and there may be thousands of values. A call for each of them would
    # take most of the time.
    return [value if type(value) in _ATOMIC_TYPES else _to_plain(value) for value in values]


def _from_plain(document: dict[str, Any]) -> Any:
    if len(document) == 1:
        ((mark, content),) = document.items()
        if mark == _TUPLE:
            return tuple(content)
        if mark == _PAIRS:
            return dict(content)
    return document
