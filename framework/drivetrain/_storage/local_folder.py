"""A folder on a local disk."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from drivetrain._storage.folder import Content, Folder, NoFileError, Sink, Source
from drivetrain._storage.writeback_file import WritebackFile

_MAX_OPEN = 64
"""Maximum number of open descriptors per folder.

A checkpoint may have thousands of files, but many systems allow 1,024 descriptors per process.
"""


class LocalFolder(Folder):
    """A folder on a local disk."""

    readers = 1  # the kernel reads ahead, and measurements with cold and warm caches showed no gain from more threads

    def __init__(self, path: str, root: str) -> None:
        super().__init__(path, root)
        self._files = _OpenFiles()

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
        return self._files.open(self._at(name))

    def read(self, name: str, limit: int | None = None) -> bytes:
        with open(self._at(name), "rb") as file:
            return file.read(limit)

    def size(self, name: str) -> int:
        return os.stat(self._at(name)).st_size

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

    def close(self) -> None:
        self._files.close()

    def _at(self, name: str) -> str:
        path = os.path.join(self.root, name) if name else self.root
        if "\0" in path:
            raise FileNotFoundError(errno.ENOENT, "no file has a null character in its name", path)
        return path


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


class _OpenFiles:
    """Files that are open for reading. The least recently used file is closed if too many files are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptors: OrderedDict[str, int] = OrderedDict()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close all files. A later read reopens a closed file."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def open(self, path: str) -> _LocalFile:
        with self._lock:
            return _LocalFile(self, path, os.fstat(self._descriptor(path)).st_size)

    def fill(self, path: str, begin: int, memory: memoryview) -> None:
        with self._lock:
            descriptor = self._descriptor(path)
            while memory:
                count = os.preadv(descriptor, [memory], begin)
                if not count:
                    raise EOFError(f"it ends at byte {begin}")
                memory, begin = memory[count:], begin + count

    def _descriptor(self, path: str) -> int:
        if path not in self._descriptors:
            if len(self._descriptors) >= _MAX_OPEN:
                os.close(self._descriptors.popitem(last=False)[1])
            self._descriptors[path] = open_regular(path)
        self._descriptors.move_to_end(path)
        return self._descriptors[path]


class _LocalFile:
    """A file of `_OpenFiles`."""

    def __init__(self, files: _OpenFiles, path: str, size: int) -> None:
        self._files = files
        self._path = path
        self.size = size

    def fill(self, begin: int, memory: memoryview) -> None:
        self._files.fill(self._path, begin, memory)


def open_regular(path: str) -> int:
    """Open a regular file. A link may lead anywhere, a pipe would block, and a device may have side effects."""
    mode = os.lstat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = "directory" if stat.S_ISDIR(mode) else "link" if stat.S_ISLNK(mode) else "device or a pipe"
        raise NoFileError(f"{os.path.basename(path)} is a {kind}")
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
