"""Checksums of the blocks of a file, so that a reader can verify single blocks."""

from __future__ import annotations

try:  # zlib_ng computes the same checksums several times as fast as zlib
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

BLOCK = 4 * 2**20
"""Block size in bytes of files that are written. A reader uses the block size in the manifest."""


class BlockChecksums:
    """Computes the checksum of each block of a file, given its bytes in order, in chunks of any size."""

    def __init__(self, block: int = BLOCK) -> None:
        self._block = block
        self._finished_blocks: list[str] = []
        self._block_checksum = 0
        self._block_bytes = 0
        self.size = 0

    def update(self, content: bytes | memoryview) -> None:
        """Add the next bytes."""
        view = memoryview(content)
        self.size += len(view)
        while len(view):
            chunk = view[: self._block - self._block_bytes]
            self._block_checksum = crc32(chunk, self._block_checksum)
            self._block_bytes += len(chunk)
            view = view[len(chunk) :]
            if self._block_bytes == self._block:
                self._close()

    def text(self) -> str:
        """Return the concatenated checksums, eight hexadecimal digits per block. The last block may be shorter."""
        if self._block_bytes:
            self._close()
        return "".join(self._finished_blocks)

    def _close(self) -> None:
        self._finished_blocks.append(f"{self._block_checksum:08x}")
        self._block_checksum = self._block_bytes = 0
