"""Checksums of the blocks of a file, so that a reader can verify single blocks."""

from __future__ import annotations

try:  # zlib_ng computes the same checksums several times as fast as zlib
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

BLOCK = 4 * 2**20
"""Block size in bytes of files that are written. A reader uses the block size in the manifest."""
