"""Reads wandb's local files, ``run-<id>.wandb``, for which wandb has no public reader in Python.

They contain protocol buffers in the record format of LevelDB's log.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER_BYTES = 7  # the size of a file's header, and of the header of a record's fragment
_BLOCK_BYTES = 32768
_FULL, _FIRST, _LAST = 1, 2, 4  # types of fragments


def row_of(history: Any) -> dict[str, Any]:
    """Return the values of a history record by name. A value with nested keys (media) is a dict."""
    row: dict[str, Any] = {}
    for item in history.item:
        name, *inner = [item.key] if item.key else item.nested_key
        if inner:
            row.setdefault(name, {})[".".join(inner)] = json.loads(item.value_json)
        else:
            row[name] = json.loads(item.value_json)
    return row


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file."""
    content = path.read_bytes()
    position, record = _HEADER_BYTES, b""
    while position + _HEADER_BYTES <= len(content):
        remaining = _BLOCK_BYTES - position % _BLOCK_BYTES
        if remaining < _HEADER_BYTES:  # The rest of the block is too short for a fragment.
            position += remaining
            continue
        checksum, length, record_type = struct.unpack_from("<IHB", content, position)
        position += _HEADER_BYTES
        piece = content[position : position + length]
        assert zlib.crc32(piece, zlib.crc32(bytes([record_type]))) == checksum
        position += length
        record = piece if record_type in (_FULL, _FIRST) else record + piece
        if record_type in (_FULL, _LAST):
            yield record
