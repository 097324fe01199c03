"""A file of a local checkpoint: a regular one, read into memory that the reader owns, with few descriptors open."""

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
"""Descriptors that the files of one checkpoint hold: it may have thousands of files, and a process 1,024."""

_SEEK_DATA = getattr(os, "SEEK_DATA", None)  # Linux and macOS have it


class ChangedFileError(OSError):
    """It is another file by now, or has become shorter."""


class NoFileError(OSError):
    """What has the name of a file is a directory, a pipe, a device, or a link that leads nowhere."""


class OpenFiles:
    """The files of one checkpoint that are open; the one that was used longest ago is closed for another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[LocalFile, int] = OrderedDict()
        self._in_use: Counter[int] = Counter()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close them; one that is read from again is opened again."""
        with self._lock:
            for file in [one for one, descriptor in self._open.items() if not self._in_use[descriptor]]:
                os.close(self._open.pop(file))

    def open(self, path: Path) -> LocalFile:
        """Open a file.

        Raises:
            NoFileError: it is none.
            OSError: it is not there, or cannot be read.
        """
        descriptor, stat_result = _open_regular(path)
        file = LocalFile(self, path, stat_result)
        with self._lock:
            self._keep(file, descriptor)
        return file

    def read(self, file: LocalFile, begin: int, memory: memoryview) -> int:
        """Fill ``memory`` from byte ``begin`` on, as far as the file goes; return how many bytes that were."""
        with self._in_use_descriptor(file) as descriptor:
            done = 0
            while done < len(memory):
                count = os.preadv(descriptor, [memory[done:]], begin + done)
                if not count:
                    break
                done += count
        return done

    def is_hole(self, file: LocalFile, begin: int, end: int) -> bool:
        """Whether nothing was ever written from ``begin`` to before ``end``, so that it reads as zeros."""
        if _SEEK_DATA is None:
            return False
        with self._in_use_descriptor(file) as descriptor:
            try:
                return os.lseek(descriptor, begin, _SEEK_DATA) >= end
            except OSError as error:  # there is no data behind it, or the disk cannot tell
                return error.errno == errno.ENXIO and os.fstat(descriptor).st_size >= end

    @contextmanager
    def _in_use_descriptor(self, file: LocalFile) -> Iterator[int]:
        with self._lock:
            descriptor = self._descriptor(file)
            self._in_use[descriptor] += 1
        try:
            yield descriptor
        finally:
            with self._lock:
                self._in_use[descriptor] -= 1

    def _descriptor(self, file: LocalFile) -> int:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        descriptor, stat_result = _open_regular(file.path)
        if not os.path.samestat(stat_result, file.stat_result):
            os.close(descriptor)
            raise ChangedFileError(f"{file.path.name} was replaced while the checkpoint was read")
        self._keep(file, descriptor)
        return descriptor

    def _keep(self, file: LocalFile, descriptor: int) -> None:
        self._open[file] = descriptor
        idle = [one for one in self._open if one is not file and not self._in_use[self._open[one]]]
        for one in idle[: len(self._open) - _MAX_OPEN] if len(self._open) > _MAX_OPEN else ():
            os.close(self._open.pop(one))


class LocalFile:
    """One of the open files.

    Args:
        files: that it is one of.
        path: where it is.
        found: what the system said of it as it was opened.
    """

    def __init__(self, files: OpenFiles, path: Path, stat_result: os.stat_result) -> None:
        self._files = files
        self.path = path
        self.stat_result = stat_result
        self.size = stat_result.st_size

    def fill(self, begin: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes from ``begin`` on.

        Raises:
            OSError: the disk failed, or the file has become shorter.
        """
        count = self._files.read(self, begin, memory)
        if count < len(memory):
            raise ChangedFileError(f"it had {self.size} bytes, and has become shorter")

    def is_hole(self, begin: int, end: int) -> bool:
        """Whether the bytes from ``begin`` to before ``end`` are zeros that take no place on the disk."""
        return self._files.is_hole(self, begin, end)


def read_whole(path: Path, limit: int) -> bytes:
    """Return a file's first ``limit`` bytes.

    Raises:
        NoFileError: it is none.
        OSError: it is not there, or cannot be read.
    """
    descriptor, _ = _open_regular(path)
    with open(descriptor, "rb") as stream:
        return stream.read(limit)


def _open_regular(path: Path) -> tuple[int, os.stat_result]:
    """Open a regular file, and nothing else: a pipe would wait for a writer, and a device may act when it is opened."""
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
