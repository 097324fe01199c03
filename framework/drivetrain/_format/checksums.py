"""Checksums of the blocks of a file, so that a reader can verify single blocks, and fingerprints of whole files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

try:  # zlib_ng computes the same checksums several times as fast as zlib
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

from drivetrain.errors import ConfigurationError, nearest

__all__ = ["BLOCK", "HASH_ALGORITHMS", "block_count", "check_digest", "crc32"]

BLOCK = 4 * 2**20
"""Block size in bytes of files that are written. A reader uses the block size in the manifest."""

HASH_ALGORITHMS: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256}
"""The hashes by name. A CRC detects accidental damage but can be forged; a cryptographic hash cannot."""


def check_digest(owner: str, digest: Any) -> None:
    """Raise if ``digest`` is neither None nor the name of a known hash.

    Args:
        owner: name of the function or class that takes the argument, for the error.
        digest: the value to check.

    Raises:
        ConfigurationError: the name is unknown.
    """
    if digest is not None and digest not in list(HASH_ALGORITHMS):
        raise ConfigurationError(
            f"{owner}(digest={digest!r}) is not supported.{nearest(str(digest), HASH_ALGORITHMS)}",
            f"supported digests of files, in addition to their checksums: {' or '.join(map(repr, HASH_ALGORITHMS))}.",
            "give one of these names, or None for checksums only.",
        )


def block_count(size: int, block: int) -> int:
    """Return the number of blocks of a file of ``size`` bytes."""
    return -(-size // block)
