"""A local file whose bytes set out for the disk at once, instead of when somebody waits for them."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h: begin, and do not wait
_MIN_WRITEBACK = 2**20  # bytes
_MAX_BUFFERS = 1024  # contents that one call takes, IOV_MAX of limits.h


class EagerFile:
    """A new file to write to; left without an error, it is on the disk.

    Args:
        path: where it must not be yet.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        self._written = 0

    def write(self, content: bytes | memoryview) -> None:
        """Write all of it."""
        self.writelines([content])

    def writelines(self, contents: Iterable[bytes | memoryview]) -> None:
        """Write all of them, in one call if they are not too many.

        The system keeps what one call brings in few large pieces of memory, which are read at less cost.
        """
        left, begin = [memoryview(content) for content in contents], self._written
        while left:
            count = os.writev(self._file.fileno(), left[:_MAX_BUFFERS])
            self._written += count
            whole = 0
            while whole < len(left) and count >= len(left[whole]):
                count -= len(left[whole])
                whole += 1
            del left[:whole]
            if count:
                left[0] = left[0][count:]
        start_writing = _system_call()
        if start_writing is not None and self._written - begin >= _MIN_WRITEBACK:
            start_writing(self._file.fileno(), begin, self._written - begin)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                os.fsync(self._file.fileno())


@functools.cache
def _system_call() -> Callable[[int, int, int], int] | None:
    library = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(library, "sync_file_range"):
        return None
    wide = ctypes.c_int64
    # What it answers does not matter: fsync tells whether all went well.
    return lambda descriptor, begin, size: int(
        library.sync_file_range(descriptor, wide(begin), wide(size), _START_WRITING)
    )
