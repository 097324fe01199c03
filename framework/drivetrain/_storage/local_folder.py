"""A folder on a local disk."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from drivetrain._storage.folder import Content, Folder, NoFileError, Sink, Source

_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h: start writeback without waiting
_MIN_WRITEBACK = 2**20  # minimum number of bytes of a write that starts writeback
_MAX_BUFFERS = 1024  # maximum number of buffers per system call, IOV_MAX of limits.h


class LocalFolder(Folder):
    """A folder on a local disk."""

    readers = 1  # the kernel reads ahead, and measurements with cold and warm caches showed no gain from more threads

    def __init__(self, path: str, root: str) -> None:
        self.path, self.root = path, root

    def make(self) -> None:
        os.makedirs(self.root, exist_ok=True)

    def exists(self, name: str = "") -> bool:
        with suppress(FileNotFoundError):
            return os.path.lexists(self._at(name))
        return False

    def entries(self) -> Iterator[tuple[str, bool]]:
        with os.scandir(self._at("")) as entries:
            for entry in entries:
                yield entry.name, _is_folder(entry)

    def find(self, name: str) -> list[str]:
        found = (os.path.join(folder, file) for folder, _, files in os.walk(self._at(name)) for file in files)
        return [os.path.relpath(path, self.root) for path in found]

    def open(self, name: str) -> Source:
        return _LocalFile(self._at(name))

    def read(self, name: str, limit: int | None = None) -> bytes:
        with open(self._at(name), "rb") as file:
            return file.read(limit)

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        found = {}
        for name in names:
            with suppress(FileNotFoundError):
                found[name] = os.stat(self._at(name)).st_size
        return found

    def create(self, name: str) -> WritebackFile:
        return WritebackFile(self._at(name))

    @contextmanager
    def replace(self, name: str) -> Iterator[Sink]:
        folder, file = os.path.split(self._at(name))
        temporary = os.path.join(folder, f".{file}-{secrets.token_hex(8)}")
        try:
            with WritebackFile(temporary) as sink:  # not synced, a crash of the machine could leave an empty file
                yield sink
            os.replace(temporary, self._at(name))
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def write(self, name: str, content: bytes) -> None:
        with self.replace(name) as sink:
            sink.write(content)

    def commit(self, name: str, contents: Sequence[Content]) -> None:
        with self.replace(name) as sink:
            sink.writelines(contents)
        sync_folder(self.root)

    def rename(self, name: str, new_name: str) -> None:
        os.rename(self._at(name), self._at(new_name))

    def remove(self, name: str) -> None:
        os.unlink(self._at(name))

    def remove_if_empty(self) -> None:
        with suppress(OSError):
            os.rmdir(self.root)

    def _at(self, name: str) -> str:
        path = os.path.join(self.root, name) if name else self.root
        if "\0" in path:
            raise FileNotFoundError(errno.ENOENT, "no file has a null character in its name", path)
        return path


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


def sync_folder(folder: str) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a symbolic link that points to itself
        return False


class _LocalFile:
    """A file, which is opened for each read: a checkpoint may have more files than a process may hold open."""

    def __init__(self, path: str) -> None:
        self._path = path
        with open(open_regular(path), "rb") as file:
            self.size = os.fstat(file.fileno()).st_size

    def fill(self, begin: int, memory: memoryview) -> None:
        with open(open_regular(self._path), "rb") as file:
            while memory:
                count = os.preadv(file.fileno(), [memory], begin)
                if not count:
                    raise EOFError(f"it ends at byte {begin}")
                memory, begin = memory[count:], begin + count


def open_regular(path: str) -> int:
    """Open a regular file. A link may lead anywhere, a pipe would block, and a device may have side effects."""
    mode = os.lstat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = "directory" if stat.S_ISDIR(mode) else "link" if stat.S_ISLNK(mode) else "device or a pipe"
        raise NoFileError(f"{os.path.basename(path)} is a {kind}")
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
