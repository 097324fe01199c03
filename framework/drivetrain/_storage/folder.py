"""The interface of a folder, on a local disk or at a URL."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, ClassVar, Protocol, Self

from drivetrain.errors import CheckpointError

Content = bytes | memoryview


class StorageError(CheckpointError):
    """The storage failed or did not answer; the checkpoint itself may be intact."""

    @classmethod
    def unanswered(cls, what: str, error: OSError) -> Self:
        """Return the error for a question that the storage did not answer, such as ``"'runs' cannot be listed"``."""
        fix = "check the storage, the credentials and the network."
        return cls(f"{what}: {error}.", "it is unknown what is there.", fix)


class NoFileError(OSError):
    """The path is a directory, a link, a pipe or a device instead of a regular file."""


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


class Sink(Protocol):
    """Destination of bytes."""

    def write(self, content: Content, /) -> Any:
        """Write all of ``content``."""

    def writelines(self, contents: Sequence[Content], /) -> Any:
        """Write all of ``contents``."""


class Folder(ABC):
    """A folder, which need not exist yet. A failure of the storage is an `OSError`, wherever the folder is.

    Attributes:
        path: the path or URL as the caller gave it.
        root: the path on the file system.
        readers: number of parallel reads to use.
    """

    readers: ClassVar[int]
    path: str
    root: str

    @abstractmethod
    def make(self) -> None:
        """Create the folder and its parents, if the storage has folders."""

    @abstractmethod
    def exists(self, name: str = "") -> bool:
        """Return whether there is anything under a name; by default, whether the folder exists."""

    @abstractmethod
    def entries(self) -> Iterator[tuple[str, bool]]:
        """Yield the name of each entry, and whether it is a folder.

        Raises:
            FileNotFoundError: the folder does not exist.
        """

    def names(self) -> list[str]:
        """Return the names of all entries, sorted. Raises what `entries` raises."""
        return sorted(name for name, _ in self.entries())

    @abstractmethod
    def find(self, name: str) -> list[str]:
        """Return the paths, relative to this folder, of all files below the sub-folder ``name``."""

    @abstractmethod
    def open(self, name: str) -> Source:
        """Open a regular file for reading.

        Raises:
            FileNotFoundError: the file does not exist.
            NoFileError: the path is not a regular file.
        """

    @abstractmethod
    def read(self, name: str, limit: int | None = None) -> bytes:
        """Return a file's content, truncated to ``limit`` bytes."""

    @abstractmethod
    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Return the current sizes of files in bytes, by name. Files that do not exist are left out."""

    @abstractmethod
    def create(self, name: str) -> AbstractContextManager[Sink]:
        """Create a file, which is durable once the context exits without an error."""

    @abstractmethod
    def replace(self, name: str) -> AbstractContextManager[Sink]:
        """Create or replace a file. It appears under its name once the context exits without an error.

        A writer that is killed leaves a temporary file, which `clear_temporary` removes.
        """

    @abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Create or replace a file, so that a reader gets either the previous content or the new content."""

    @abstractmethod
    def commit(self, name: str, contents: Sequence[Content]) -> None:
        """Like `write`, but retry, and make the file durable together with all files that were written before."""

    @abstractmethod
    def rename(self, name: str, new_name: str) -> None:
        """Give a file a new name. A file of that name is replaced."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file."""

    def clear_temporary(self, name: str) -> None:
        """Remove what killed writers of a file left. No other process may be writing the file."""
        temporary = re.compile(rf"\.{re.escape(name)}-[0-9a-f]{{16}}")
        for found in filter(temporary.fullmatch, self.names()):
            with suppress(OSError):
                self.remove(found)

    @abstractmethod
    def remove_if_empty(self) -> None:
        """Remove the folder if it is empty, and do nothing otherwise."""
