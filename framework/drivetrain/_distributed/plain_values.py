"""Plain values as bytes that come back equal: what ranks say to each other. No pickle: reading one can run no code."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

# A dict with a single key of these stands for what JSON has no form for.
_TUPLE, _PAIRS = "$tuple", "$pairs"
_ATOMS = frozenset({str, int, float, bool, type(None)})


def encode(value: Any) -> bytes:
    """Return ``value`` as text that `decode` turns back into its equal.

    Args:
        value: nested dicts, lists and tuples of numbers (NaN and infinities too), strings, booleans and None. Of a
            subclass of these (a NamedTuple, an IntEnum) the plain value comes back.

    Raises:
        TypeError: names the type of a value that is nothing of this.
    """
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def decode(content: bytes | bytearray) -> Any:
    """Return what `encode` was given."""
    return json.loads(content, object_hook=_restored)


def _plain(value: Any) -> Any:
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
    raise TypeError(f"ranks tell each other plain values, and this is a {type(value).__name__}")


def _all_plain(values: Iterable[Any]) -> list[Any]:
    # Most are of these types, and there may be many thousands: a call for each would be most of the time.
    return [value if type(value) in _ATOMS else _plain(value) for value in values]


def _restored(document: dict[str, Any]) -> Any:
    if len(document) == 1:
        ((mark, content),) = document.items()
        if mark == _TUPLE:
            return tuple(content)
        if mark == _PAIRS:
            return dict(content)
    return document
