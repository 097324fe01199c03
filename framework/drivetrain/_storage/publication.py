"""Publishes the files of a folder in one step: a reader sees none of them, or all."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress

from drivetrain._storage.folder import Folder, Sink


class Publication(ABC):
    """Files that several ranks write to a folder. Rank 0 begins it, and the other ranks join it with its token.

    Args:
        folder: where the files are created.
        token: random text that tells this writer's files from those of others.
    """

    def __init__(self, folder: Folder, token: str) -> None:
        self._folder = folder
        self.token = token

    def file_name(self, name: str) -> str:
        """Return the name to use for a file, which is unique if an existing file of this name may be in use."""
        return name

    def create(self, name: str) -> AbstractContextManager[Sink]:
        """Create a file, which is durable once the context exits without an error."""
        return self._folder.create(name)

    def size(self, name: str) -> int:
        """Return a file's current size in bytes."""
        return self._folder.size(name)

    def keep(self) -> None:
        """Exclude the files written so far from `abandon`, because rank 0 may commit them from now on."""

    @abstractmethod
    def commit(self, name: str, content: bytes, listed: Callable[[bytes], Iterable[str]]) -> None:
        """Publish the files, atomically, by writing the last one. Rank 0 only.

        Args:
            name: name of the last file, which lists the others.
            content: its content.
            listed: returns the names of the files that such a content lists; none if it is damaged.

        Raises:
            Exception: the storage did not confirm the commit, which may have happened nevertheless.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Remove this rank's uncommitted files, as far as the storage allows."""


class RemotePublication(Publication):
    """Files at a URL. They get unique names, and only the last one, which lists the others, is overwritten.

    Concurrent writers never share file names, and the last file names the files of only one of them. Once it may have
    been stored, no rank deletes the files that it names, because the reply to a successful upload can be lost.
    """

    def __init__(self, folder: Folder, token: str) -> None:
        super().__init__(folder, token)
        self._created_names: list[str] = []

    @classmethod
    def begin(cls, folder: Folder) -> RemotePublication:
        """Begin a publication with unique file names."""
        folder.make()
        return cls(folder, secrets.token_hex(8))

    def file_name(self, name: str) -> str:
        stem, dot, extension = name.partition(".")
        return f"{stem}-{self.token}{dot}{extension}"

    def create(self, name: str) -> AbstractContextManager[Sink]:
        self._created_names.append(name)
        return super().create(name)

    def keep(self) -> None:
        self._created_names.clear()

    def commit(self, name: str, content: bytes, listed: Callable[[bytes], Iterable[str]]) -> None:
        before = self._stored(name)
        self._folder.commit(name, [content])
        # If another writer has replaced this content in the meantime, that writer does the cleanup.
        if before is not None and self._stored(name) == content:
            self._remove(set(listed(before)) - set(listed(content)))

    def abandon(self) -> None:
        self._remove(self._created_names)

    def _stored(self, name: str) -> bytes | None:
        """Return what is stored under a name; None if that is unknown, so that no old files are removed."""
        with suppress(Exception):
            return self._folder.read(name)
        return None

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(Exception):
                self._folder.remove(name)
