"""A folder at a URL: a prefix in an object store, or a folder of any other file system of fsspec."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from drivetrain._storage.folder import Content, Folder, Sink, Source
from drivetrain._storage.retries import retried
from drivetrain.errors import CheckpointError

# Protocols of stores on which creating a folder would create a bucket (even for a misspelt name), and on which each
# upload is atomic.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci"}


class RemoteFolder(Folder):
    """A folder at a URL.

    Args:
        path: the URL as the caller gave it.
        filesystem: the fsspec file system.
        root: the path on the file system.
    """

    readers = 8

    def __init__(self, path: str, filesystem: Any, root: str) -> None:
        self.path, self.root = path, root.rstrip("/")
        self._filesystem = filesystem
        self._is_object_store = bool(_OBJECT_STORES.intersection(protocols_of(filesystem)))

    @contextmanager
    def _request(self) -> Iterator[Any]:
        """Yield the file system without what it remembers; its errors, which are of many classes, become `OSError`."""
        with _as_os_errors():
            self._filesystem.invalidate_cache()
            yield self._filesystem

    def make(self) -> None:
        if not self._is_object_store:
            with _as_os_errors():
                self._filesystem.makedirs(self.root, exist_ok=True)

    def exists(self, name: str = "") -> bool:
        with self._request() as filesystem:
            try:
                filesystem.info(self._at(name))  # fsspec's `exists` returns False on an error
            except FileNotFoundError:
                return False
            return True

    def entries(self) -> Iterator[tuple[str, bool]]:
        with self._request() as filesystem:
            found = filesystem.ls(self.root, detail=True)
        for entry in found:
            yield entry["name"].rstrip("/").rpartition("/")[2], entry["type"] == "directory"

    def find(self, name: str) -> list[str]:
        with self._request() as filesystem:
            return [path[len(self.root) :].lstrip("/") for path in filesystem.find(self._at(name))]

    def open(self, name: str) -> Source:
        with _as_os_errors():
            return _RemoteFile(self._filesystem, self._at(name))

    def read(self, name: str, limit: int | None = None) -> bytes:
        with self._request() as filesystem:
            if limit is not None:
                return _read_range(filesystem, self._at(name), 0, min(limit, int(filesystem.size(self._at(name)) or 0)))
            content: bytes = filesystem.cat_file(self._at(name))
            return content

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        found = {}
        for name in names:
            with suppress(FileNotFoundError), self._request() as filesystem:
                found[name] = int(filesystem.size(self._at(name)) or 0)
        return found

    @contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        """Create an object. The upload ends when the stream is closed.

        If closing raises an error, the object may be stored nevertheless, so its size is compared. No other writer may
        use this name.
        """
        with _as_os_errors():
            stream = self._filesystem.open(self._at(name), "wb")
        try:
            yield _RemoteSink(stream)
            nbytes = stream.tell()
            with _as_os_errors():
                try:
                    stream.close()
                except Exception:
                    if not _is_true(lambda: self.sizes([name]) == {name: nbytes}):
                        raise
        except BaseException:
            # The incomplete content must not be uploaded, even when the stream is garbage-collected.
            with suppress(Exception):
                stream.discard()
            with suppress(AttributeError):
                stream.closed = True
            raise

    @contextmanager
    def replace(self, name: str) -> Iterator[Sink]:
        if self._is_object_store:
            with self.create(name) as stream:
                yield stream
            return
        folder, slash, file = name.rpartition("/")
        temporary = f"{folder}{slash}.{file}-{secrets.token_hex(8)}"
        self.make()
        try:
            with self.create(temporary) as stream:
                yield stream
            with _as_os_errors():
                self._filesystem.mv(self._at(temporary), self._at(name))
        except BaseException:
            with suppress(Exception):
                self.remove(temporary)
            raise

    def write(self, name: str, content: bytes) -> None:
        with self.replace(name) as sink:
            sink.write(content)

    def commit(self, name: str, contents: Sequence[Content]) -> None:
        content = b"".join(contents)

        def put() -> None:
            try:
                self._filesystem.pipe_file(self._at(name), content)
            except Exception:  # error classes depend on the store's library
                if not _is_true(lambda: self.read(name) == content):  # otherwise, only the reply was lost
                    raise

        with _as_os_errors():
            retried(put)

    def rename(self, name: str, new_name: str) -> None:
        with _as_os_errors():
            self._filesystem.mv(self._at(name), self._at(new_name))

    def remove(self, name: str) -> None:
        with _as_os_errors():
            self._filesystem.rm_file(self._at(name))

    def remove_if_empty(self) -> None:
        with suppress(OSError, NotImplementedError):  # the folder is not empty, or the storage has no folders
            self._filesystem.rmdir(self.root)

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root


def protocols_of(filesystem: Any) -> set[str]:
    """Return the protocol names of a file system."""
    known = filesystem.protocol
    return {known} if isinstance(known, str) else set(known)


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Convert the errors of storage libraries, which use various classes, to `OSError`."""
    try:
        yield
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


class _RemoteSink:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, content: Content) -> None:
        with _as_os_errors():
            self._stream.write(content)

    def writelines(self, contents: Sequence[Content]) -> None:
        for content in contents:
            self.write(content)


class _RemoteFile:
    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem = filesystem
        self._path = path
        self.size = int(filesystem.size(path))

    def fill(self, begin: int, memory: memoryview) -> None:
        with _as_os_errors():
            memory[:] = _read_range(self._filesystem, self._path, begin, begin + len(memory))


def _read_range(filesystem: Any, path: str, begin: int, end: int) -> bytes:
    """Return exactly the bytes from ``begin`` up to ``end`` of an object, or raise `OSError`."""
    if begin >= end:
        return b""  # object stores reject an empty range
    content: bytes = filesystem.cat_file(path, start=begin, end=end)
    if len(content) != end - begin:
        raise OSError(f"{len(content)} bytes were received instead of {end - begin}")
    return content


def _is_true(ask: Callable[[], bool]) -> bool:
    """Return the answer; False if the storage gives none."""
    try:
        return ask()
    except Exception:
        return False
