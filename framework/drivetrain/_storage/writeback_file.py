"""A local file whose writeback starts with each write instead of at the final fsync."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h: start writeback without waiting
_MIN_WRITEBACK = 2**20  # minimum number of bytes of a write that starts writeback
_MAX_BUFFERS = 1024  # maximum number of buffers per system call, IOV_MAX of limits.h


class WritebackFile:
    """A new file, which is synced to disk when its context exits without an error.

    Args:
        path: the path, which must not exist yet.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        self._bytes_written = 0

    def write(self, content: bytes | memoryview) -> None:
        """Write all of ``content``."""
        self.writelines([content])

    def writelines(self, contents: Iterable[bytes | memoryview]) -> None:
        """Write all of ``contents``, in as few system calls as possible.

        One large call lets the kernel use large folios in the page cache, which are cheaper to read.
        """
        remaining, begin = [memoryview(content) for content in contents], self._bytes_written
        while remaining:
            count = os.writev(self._file.fileno(), remaining[:_MAX_BUFFERS])
            self._bytes_written += count
            finished = 0
            while finished < len(remaining) and count >= len(remaining[finished]):
                count -= len(remaining[finished])
                finished += 1
            del remaining[:finished]
            if count:
                remaining[0] = remaining[0][count:]
        start_writeback = _sync_file_range()
        if start_writeback is not None and self._bytes_written - begin >= _MIN_WRITEBACK:
            start_writeback(self._file.fileno(), begin, self._bytes_written - begin)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                os.fsync(self._file.fileno())


@functools.cache
def _sync_file_range() -> Callable[[int, int, int], int] | None:
    library = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(library, "sync_file_range"):
        return None
    offset = ctypes.c_int64
    # The result is ignored, since fsync reports errors.
    return lambda descriptor, begin, size: int(
        library.sync_file_range(descriptor, offset(begin), offset(size), _START_WRITING)
    )
