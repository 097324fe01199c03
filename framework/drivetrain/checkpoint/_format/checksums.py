"""Checksums of a file, block by block, so that a reader can check the part that it reads; and a digest of all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

try:  # several times as fast, with the same sums
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

from drivetrain.errors import ConfigurationError, nearest

__all__ = ["BLOCK", "DIGESTS", "BlockChecksums", "block_count", "check_digest", "checksums_of", "crc32"]

BLOCK = 4 * 2**20
"""Bytes of a block in what we write; a reader takes the size from the manifest."""

DIGESTS: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256}
"""By name. A checksum tells of accidents: who alters a file on purpose keeps it right. Nobody can so keep a digest."""


def check_digest(owner: str, digest: Any) -> None:
    """Refuse what names no digest.

    Raises:
        ConfigurationError: says whose argument it is, and what it may be.
    """
    if digest is not None and digest not in list(DIGESTS):
        raise ConfigurationError(
            f"{owner}(digest={digest!r}).{nearest(str(digest), DIGESTS)}",
            f"it names what each file has beside its checksums: {' or '.join(map(repr, DIGESTS))}.",
            "give that, or None for checksums alone.",
        )


class BlockChecksums:
    """Takes a file's bytes in order, in portions of any size."""

    def __init__(self, block: int = BLOCK) -> None:
        self._block = block
        self._done: list[str] = []
        self._sum = 0
        self._filled = 0
        self.size = 0

    def update(self, content: bytes | memoryview) -> None:
        """Go on with the next bytes."""
        view = memoryview(content)
        self.size += len(view)
        while len(view):
            portion = view[: self._block - self._filled]
            self._sum = crc32(portion, self._sum)
            self._filled += len(portion)
            view = view[len(portion) :]
            if self._filled == self._block:
                self._close()

    def text(self) -> str:
        """Return eight hexadecimal digits for each block, one after the other; the last block may be short."""
        if self._filled:
            self._close()
        return "".join(self._done)

    def _close(self) -> None:
        self._done.append(f"{self._sum:08x}")
        self._sum = self._filled = 0


def checksums_of(content: bytes) -> BlockChecksums:
    """Return the checksums of a whole content."""
    sums = BlockChecksums()
    sums.update(content)
    return sums


def block_count(size: int, block: int) -> int:
    """Return how many blocks a file of ``size`` bytes has."""
    return -(-size // block)
