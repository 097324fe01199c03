"""Where a checkpoint is read: by byte ranges, on a local disk or in an object store."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from drivetrain.checkpoint._format.local_place import standing_in
from drivetrain.checkpoint._format.place import filesystem_of
from drivetrain.errors import CheckpointError


class StorageError(CheckpointError):
    """A storage did not give what may well be there: it refused, or does not answer."""


class Source(Protocol):
    """The bytes of one file.

    Attributes:
        size: how many.
        mapped: whether `read` gives the file's own memory and costs nothing.
    """

    size: int
    mapped: bool

    def read(self, begin: int, end: int) -> memoryview | bytes:
        """Return the bytes from ``begin`` to before ``end``."""


class Folder(Protocol):
    """The files of one checkpoint.

    Attributes:
        path: as it was asked for.
        readers: how many reads at once pay.
    """

    path: str
    readers: int

    def open(self, name: str) -> Source:
        """Raises:
        FileNotFoundError: it is not there.
        OSError: it cannot be read.
        """

    def read_all(self, name: str, limit: int) -> bytes:
        """Return a whole file, of at most ``limit`` bytes."""


def folder_at(path: str) -> Folder:
    """Return the folder at a path or an fsspec URL, whatever it holds.

    Raises:
        CheckpointError: there is none.
    """
    filesystem, root = filesystem_of(path)
    if filesystem is not None:
        return _object_folder(path, filesystem, root.rstrip("/"))
    if not os.path.lexists(root):
        instead = standing_in(root)
        if instead is None:
            raise _nothing_at(path)
        root = instead
    if not os.path.isdir(root):
        raise CheckpointError(f"{path!r} is no checkpoint.", "it is a file, and a checkpoint is a folder.", _CONVERT)
    return _LocalFolder(path, Path(root))


_CONVERT = "for what another library wrote, see drivetrain.checkpoint.convert."


def _nothing_at(path: str) -> CheckpointError:
    return CheckpointError(f"There is no checkpoint at {path!r}.", "nothing is there.", "check the path.")


class _LocalFolder:
    readers = 1  # the disk reads ahead by itself, and threads would take turns (measured, cold and warm)

    def __init__(self, path: str, root: Path) -> None:
        self.path = path
        self._root = root

    def open(self, name: str) -> Source:
        return _MappedFile(self._root / name)

    def read_all(self, name: str, limit: int) -> bytes:
        with open(self._root / name, "rb") as stream:
            return stream.read(limit)


class _MappedFile:
    """A file in memory as the disk's cache holds it: nothing is copied, and nothing is read that nobody asks for."""

    mapped = True

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as stream:
            self.size = os.fstat(stream.fileno()).st_size
            # A private map: tensors on it may be written to, and the file does not notice.
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) if self.size else None

    def read(self, begin: int, end: int) -> memoryview | bytes:
        if self._map is None or begin >= end:
            return b""
        return memoryview(self._map)[begin:end]


def _object_folder(path: str, filesystem: Any, root: str) -> Folder:
    try:
        with as_os_errors():
            filesystem.invalidate_cache()
            there = filesystem.exists(root)
    except OSError as error:
        raise StorageError(
            f"{path!r} cannot be reached: {error}.",
            "the storage refused, or does not answer.",
            "check the URL, the credentials and the network.",
        ) from error
    if not there:
        raise _nothing_at(path)
    return _ObjectFolder(path, filesystem, root)


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Each store's library has errors of its own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


class _ObjectFolder:
    readers = 8

    def __init__(self, path: str, filesystem: Any, root: str) -> None:
        self.path = path
        self._filesystem = filesystem
        self._root = root

    def open(self, name: str) -> Source:
        with as_os_errors():
            return _RemoteFile(self._filesystem, f"{self._root}/{name}")

    def read_all(self, name: str, limit: int) -> bytes:
        with as_os_errors():
            content: bytes = self._filesystem.cat_file(f"{self._root}/{name}")
        return content[:limit]


class _RemoteFile:
    mapped = False

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem = filesystem
        self._path = path
        self.size = int(filesystem.size(path))

    def read(self, begin: int, end: int) -> memoryview | bytes:
        return b"" if begin >= end else self._filesystem.cat_file(self._path, start=begin, end=end)
