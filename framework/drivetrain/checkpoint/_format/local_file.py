"""Reads regular files of a local checkpoint, with a bounded number of open descriptors."""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from pathlib import Path

_MAX_OPEN = 64
"""Maximum number of open descriptors per checkpoint.

A checkpoint may have thousands of files, but many systems allow 1,024 descriptors per process.
"""


class NoFileError(OSError):
    """The path is a directory, a link, a pipe or a device instead of a regular file."""


class OpenFiles:
    """The open files of one checkpoint. The least recently used file is closed if too many files are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptors: OrderedDict[Path, int] = OrderedDict()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close all files. A later read reopens a closed file."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def open(self, path: Path) -> LocalFile:
        """Open a file.

        Raises:
            NoFileError: the path is not a regular file.
            OSError: the file does not exist, or cannot be read.
        """
        with self._lock:
            return LocalFile(self, path, os.fstat(self._descriptor(path)).st_size)

    def fill(self, path: Path, begin: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes of a file from offset ``begin``.

        Raises:
            EOFError: the file ends before.
            OSError: the file cannot be read.
        """
        with self._lock:
            descriptor = self._descriptor(path)
            while memory:
                count = os.preadv(descriptor, [memory], begin)
                if not count:
                    raise EOFError(f"it ends at byte {begin}")
                memory, begin = memory[count:], begin + count

    def _descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            if len(self._descriptors) >= _MAX_OPEN:
                os.close(self._descriptors.popitem(last=False)[1])
            self._descriptors[path] = _open_regular(path)
        self._descriptors.move_to_end(path)
        return self._descriptors[path]


class LocalFile:
    """A file of `OpenFiles`.

    Args:
        files: the `OpenFiles` that the file belongs to.
        path: path of the file.
        size: size of the file in bytes.
    """

    def __init__(self, files: OpenFiles, path: Path, size: int) -> None:
        self._files = files
        self._path = path
        self.size = size

    def fill(self, begin: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes starting at ``begin``.

        Raises:
            EOFError: the file ends before.
            OSError: the file cannot be read.
        """
        self._files.fill(self._path, begin, memory)


def read_whole(path: Path, limit: int) -> bytes:
    """Return a file's first ``limit`` bytes.

    Raises:
        NoFileError: the path is not a regular file.
        OSError: the file does not exist, or cannot be read.
    """
    with open(_open_regular(path), "rb") as stream:
        return stream.read(limit)


def _open_regular(path: Path) -> int:
    """Open a regular file. A link may lead anywhere, a pipe would block, and a device may have side effects."""
    mode = os.lstat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = "directory" if stat.S_ISDIR(mode) else "link" if stat.S_ISLNK(mode) else "device or a pipe"
        raise NoFileError(f"{path.name} is a {kind}")
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
