"""JSON documents that end with a checksum of their content, so that a truncated document is detected."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

_CHECKSUM_END = re.compile(rb',\n "crc32": "([0-9a-f]{8})"\n}\n\Z')


def dump_with_checksum(document: dict[str, Any]) -> bytes:
    """Return a JSON-able document as text that ends with its checksum."""
    body = json.dumps(document, indent=1, allow_nan=False).encode().removesuffix(b"\n}")
    return body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode()


def has_valid_checksum(content: bytes) -> bool:
    """Return whether a text ends with the checksum of its content, as `dump_with_checksum` writes it."""
    end = _CHECKSUM_END.search(content)
    return end is not None and int(end[1], 16) == zlib.crc32(content[: end.start()])
