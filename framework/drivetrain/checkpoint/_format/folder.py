"""Reads the files of a checkpoint by byte ranges, from a local disk or an object store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from drivetrain.checkpoint._format.local_file import NoFileError, OpenFiles, read_whole
from drivetrain.checkpoint._format.local_storage import find_interrupted_replacement
from drivetrain.checkpoint._format.storage import filesystem_of, path_exists
from drivetrain.errors import CheckpointError


class StorageError(CheckpointError):
    """The storage failed or did not answer; the checkpoint itself may be intact."""


class Source(Protocol):
    """The bytes of one open file.

    Attributes:
        size: size of the file in bytes when the file was opened.
    """

    size: int

    def fill(self, begin: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes starting at ``begin``.

        Raises:
            EOFError: the file has fewer bytes.
            OSError: the storage failed.
        """


class Folder(Protocol):
    """The files of one checkpoint.

    Attributes:
        path: the path as the caller gave it.
        readers: number of parallel reads to use.
    """

    path: str
    readers: int

    def open(self, name: str) -> Source:
        """Open a file.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: the path is not a regular file, or the file cannot be read.
        """

    def read_all(self, name: str, limit: int) -> bytes:
        """Return a file's content, truncated to ``limit`` bytes."""

    def close(self) -> None:
        """Close all files. A later read opens the files again."""


def folder_at(path: str) -> Folder:
    """Return the folder at a path or an fsspec URL, without checking whether it holds a checkpoint.

    Raises:
        CheckpointError: there is no folder at this path.
    """
    filesystem, root = filesystem_of(path)
    if filesystem is not None:
        return _object_folder(path, filesystem, root.rstrip("/"))
    if not os.path.lexists(root):
        moved_aside = find_interrupted_replacement(root)
        if moved_aside is None:
            raise _missing_error(path)
        root = moved_aside
    if not os.path.isdir(root):
        raise CheckpointError(
            f"{path!r} is not a checkpoint.", "it is a file, and a checkpoint is a folder.", _CONVERT_HINT
        )
    return _LocalFolder(path, Path(root))


def read_if_there(folder: Folder, name: str, limit: int) -> bytes | None:
    """Return the first ``limit`` bytes of a file; None if there is no such file.

    Raises:
        StorageError: the storage failed, or denied access.
    """
    try:
        return folder.read_all(name, limit)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, NoFileError):
        return None
    except OSError as error:
        raise StorageError(
            f"{name} of {folder.path!r} cannot be read: {error}.",
            "the storage denied access, or does not answer.",
            "check the path and its permissions.",
        ) from error


_CONVERT_HINT = "for files of another library, see drivetrain.checkpoint.convert."


def _missing_error(path: str) -> CheckpointError:
    return CheckpointError(f"There is no checkpoint at {path!r}.", "the path does not exist.", "check the path.")


class _LocalFolder:
    readers = 1  # the kernel reads ahead, and measurements with cold and warm caches showed no gain from more threads

    def __init__(self, path: str, root: Path) -> None:
        self.path = path
        self._root = root
        self._files = OpenFiles()

    def open(self, name: str) -> Source:
        return self._files.open(self._root / name)

    def read_all(self, name: str, limit: int) -> bytes:
        return read_whole(self._root / name, limit)

    def close(self) -> None:
        self._files.close()


def _object_folder(path: str, filesystem: Any, root: str) -> Folder:
    try:
        with as_os_errors():
            filesystem.invalidate_cache()
            exists = path_exists(filesystem, root)
    except OSError as error:
        raise StorageError(
            f"{path!r} cannot be reached: {error}.",
            "the storage denied access, or does not answer.",
            "check the URL, the credentials and the network.",
        ) from error
    if not exists:
        raise _missing_error(path)
    return _ObjectFolder(path, filesystem, root)


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Convert the errors of storage libraries, which use various classes, to `OSError`."""
    try:
        yield
    except (OSError, CheckpointError):
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
        path = f"{self._root}/{name}"
        with as_os_errors():
            size = min(int(self._filesystem.size(path)), limit)
            return _read_range(self._filesystem, path, 0, size)

    def close(self) -> None:
        """Do nothing, because no files are kept open."""


class _RemoteFile:
    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem = filesystem
        self._path = path
        self.size = int(filesystem.size(path))

    def fill(self, begin: int, memory: memoryview) -> None:
        with as_os_errors():
            memory[:] = _read_range(self._filesystem, self._path, begin, begin + len(memory))


def _read_range(filesystem: Any, path: str, begin: int, end: int) -> bytes:
    """Return exactly the bytes from ``begin`` up to ``end`` of an object, or raise `OSError`."""
    if begin >= end:
        return b""  # object stores reject an empty range
    content: bytes = filesystem.cat_file(path, start=begin, end=end)
    if len(content) != end - begin:
        raise OSError(f"{len(content)} bytes were received instead of {end - begin}")
    return content
