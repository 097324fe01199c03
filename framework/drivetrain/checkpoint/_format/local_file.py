"""Reads regular files of a local checkpoint, with a bounded number of open descriptors."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAX_OPEN = 64
"""Maximum number of open descriptors per checkpoint.

A checkpoint may have thousands of files, but many systems allow 1,024 descriptors per process.
"""

_SEEK_DATA = getattr(os, "SEEK_DATA", None)  # available on Linux and macOS


class ChangedFileError(OSError):
    """The file was replaced or truncated while the checkpoint was open."""


class NoFileError(OSError):
    """The path is a directory, a pipe, a device or a broken link instead of a regular file."""


class OpenFiles:
    """The open files of one checkpoint. The least recently used file is closed if too many files are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptors: OrderedDict[LocalFile, int] = OrderedDict()
        self._use_counts: Counter[int] = Counter()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close all files that are not being read. A later read reopens a closed file."""
        with self._lock:
            for file in [
                candidate for candidate, descriptor in self._descriptors.items() if not self._use_counts[descriptor]
            ]:
                os.close(self._descriptors.pop(file))

    def open(self, path: Path) -> LocalFile:
        """Open a file.

        Raises:
            NoFileError: the path is not a regular file.
            OSError: the file does not exist, or cannot be read.
        """
        descriptor, stat_result = _open_regular(path)
        file = LocalFile(self, path, stat_result)
        with self._lock:
            self._keep_open(file, descriptor)
        return file

    def read(self, file: LocalFile, begin: int, memory: memoryview) -> int:
        """Fill ``memory`` from offset ``begin``, up to the end of the file; return the number of bytes read."""
        with self._in_use_descriptor(file) as descriptor:
            bytes_read = 0
            while bytes_read < len(memory):
                count = os.preadv(descriptor, [memory[bytes_read:]], begin + bytes_read)
                if not count:
                    break
                bytes_read += count
        return bytes_read

    def is_hole(self, file: LocalFile, begin: int, end: int) -> bool:
        """Return whether ``begin`` up to ``end`` is a hole of a sparse file, which reads as zeros."""
        if _SEEK_DATA is None:
            return False
        with self._in_use_descriptor(file) as descriptor:
            try:
                return os.lseek(descriptor, begin, _SEEK_DATA) >= end
            except OSError as error:  # ENXIO means that there is no data after `begin`
                return error.errno == errno.ENXIO and os.fstat(descriptor).st_size >= end

    @contextmanager
    def _in_use_descriptor(self, file: LocalFile) -> Iterator[int]:
        with self._lock:
            descriptor = self._descriptor(file)
            self._use_counts[descriptor] += 1
        try:
            yield descriptor
        finally:
            with self._lock:
                self._use_counts[descriptor] -= 1

    def _descriptor(self, file: LocalFile) -> int:
        if file in self._descriptors:
            self._descriptors.move_to_end(file)
            return self._descriptors[file]
        descriptor, stat_result = _open_regular(file.path)
        if not os.path.samestat(stat_result, file.stat_result):
            os.close(descriptor)
            raise ChangedFileError(f"{file.path.name} was replaced while the checkpoint was read")
        self._keep_open(file, descriptor)
        return descriptor

    def _keep_open(self, file: LocalFile, descriptor: int) -> None:
        self._descriptors[file] = descriptor
        idle = [
            candidate
            for candidate in self._descriptors
            if candidate is not file and not self._use_counts[self._descriptors[candidate]]
        ]
        for candidate in idle[: len(self._descriptors) - _MAX_OPEN] if len(self._descriptors) > _MAX_OPEN else ():
            os.close(self._descriptors.pop(candidate))


class LocalFile:
    """A file of `OpenFiles`.

    Args:
        files: the `OpenFiles` that the file belongs to.
        path: path of the file.
        stat_result: status of the file when it was opened.
    """

    def __init__(self, files: OpenFiles, path: Path, stat_result: os.stat_result) -> None:
        self._files = files
        self.path = path
        self.stat_result = stat_result
        self.size = stat_result.st_size

    def fill(self, begin: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes starting at ``begin``.

        Raises:
            OSError: the disk failed, or the file has become shorter.
        """
        count = self._files.read(self, begin, memory)
        if count < len(memory):
            raise ChangedFileError(f"it had {self.size} bytes and is shorter now")

    def is_hole(self, begin: int, end: int) -> bool:
        """Return whether the bytes from ``begin`` up to ``end`` are a hole of a sparse file."""
        return self._files.is_hole(self, begin, end)


def read_whole(path: Path, limit: int) -> bytes:
    """Return a file's first ``limit`` bytes.

    Raises:
        NoFileError: the path is not a regular file.
        OSError: the file does not exist, or cannot be read.
    """
    descriptor, _ = _open_regular(path)
    with open(descriptor, "rb") as stream:
        return stream.read(limit)


def _open_regular(path: Path) -> tuple[int, os.stat_result]:
    """Open a regular file. Other files are rejected: a pipe would block, and a device may have side effects."""
    try:
        _check_regular(path, os.stat(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NoFileError(f"{path.name} is a link to itself") from error
        raise
    try:
        stat_result = os.fstat(descriptor)
        _check_regular(path, stat_result)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, stat_result


def _check_regular(path: Path, stat_result: os.stat_result) -> None:
    if not stat.S_ISREG(stat_result.st_mode):
        raise NoFileError(
            f"{path.name} is a {'directory' if stat.S_ISDIR(stat_result.st_mode) else 'device or a pipe'}"
        )
