"""Publishes the files of a folder in one step: a reader sees none of them, or all.

At a URL, files get unique names, and the last one names the others. On a local disk, a temporary folder is renamed when
it is complete. A local writer uses three entries in the target's parent folder: ``.saving-<token>`` (being written),
``.replaced-<token>`` (the old folder, moved aside) and a lock file that holds the target's name. The lock file is
created first and removed last.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from drivetrain._storage.atomic_exchange import exchange
from drivetrain._storage.folder import Folder
from drivetrain._storage.local_folder import LocalFolder, open_regular, sync_folder
from drivetrain._storage.paths import local_path

_MAX_NAME_BYTES = 1024
_LOCK_NAME = re.compile(r"\.saving-([0-9a-f]{16})\.lock")
# This file is locked while a name is chosen. It is opened for writing, because NFS requires that for a lock.
_CLAIM_LOCK = ".choosing.lock"


class Publication(ABC):
    """Files that several ranks write to a folder. Rank 0 begins it, and the other ranks join it with its token.

    Attributes:
        folder: where the files are created.
        token: random text that tells this writer's files from those of others.
        suffix: what the stems of the files' names end with, if existing files of these names may be in use.
        names: the names of this rank's files, which `abandon` removes if readers might find them. The writer clears it
            before rank 0 may commit the files.
    """

    folder: Folder
    token: str
    suffix: str
    names: list[str]

    @abstractmethod
    def publish(self, name: str, content: bytes, listed: Callable[[bytes], Iterable[str]]) -> None:
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
        self.folder, self.token, self.suffix, self.names = folder, token, f"-{token}", []

    @classmethod
    def begin(cls, folder: Folder) -> RemotePublication:
        """Begin a publication with unique file names."""
        folder.make()
        return cls(folder, secrets.token_hex(8))

    def publish(self, name: str, content: bytes, listed: Callable[[bytes], Iterable[str]]) -> None:
        before = self._stored(name)
        self.folder.commit(name, [content])
        # If another writer has replaced this content in the meantime, that writer does the cleanup.
        if before is not None and self._stored(name) == content:
            self._remove(set(listed(before)) - set(listed(content)))

    def abandon(self) -> None:
        self._remove(self.names)

    def _stored(self, name: str) -> bytes | None:
        """Return what is stored under a name; None if that is unknown, so that no old files are removed."""
        with suppress(Exception):
            return self.folder.read(name)
        return None

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(Exception):
                self.folder.remove(name)


class LocalPublication(Publication):
    """A temporary folder that replaces the target when it is committed.

    Args:
        target: path of the folder to publish.
        entries: this writer's entries beside the target.
        check: raises an error if the target may not be replaced.
    """

    def __init__(self, target: Path, entries: _Entries, check: Callable[[Path], None] = lambda target: None) -> None:
        self.folder = LocalFolder(str(target), str(entries.written))
        self.token, self.suffix, self.names = entries.token, "", []
        self._target = target
        self._entries = entries
        self._check = check

    @classmethod
    def begin(cls, target: Path, check: Callable[[Path], None] = lambda target: None) -> LocalPublication:
        """Create the temporary folder.

        Raises:
            OSError: the folder cannot be created.
        """
        publication = cls(target, _Entries.create(target.parent, target.name), check)
        try:
            publication.folder.make()
        except BaseException:
            publication.abandon()
            raise
        return publication

    @classmethod
    def join(cls, target: Path, token: str) -> LocalPublication:
        """Return the publication that rank 0 began."""
        return cls(target, _Entries(target.parent, token))

    def publish(self, name: str, content: bytes, listed: Callable[[bytes], Iterable[str]]) -> None:
        with self.folder.create(name) as sink:
            sink.write(content)
        sync_folder(self.folder.root)
        self._move_into_place()
        sync_folder(str(self._target.parent))
        self.abandon()

    def abandon(self) -> None:
        self._entries.remove()

    def _move_into_place(self) -> None:
        written, aside = self._entries.written, self._entries.moved_aside
        try:
            os.rename(written, self._target)
            return
        except OSError:
            # Renaming fails if the target is a folder with content. In that case the two folders are exchanged.
            if not self._target.is_dir() or not any(self._target.iterdir()):
                raise
        self._check(self._target)
        if exchange(str(written), str(self._target)):
            return
        # If this process is killed between the renames, `find_interrupted_replacement` finds the old folder.
        os.rename(self._target, aside)
        try:
            os.rename(written, self._target)
        except BaseException:
            os.rename(aside, self._target)
            raise


class _Entries:
    """The entries of one writer in a folder.

    Args:
        folder: the folder.
        token: random text that makes the names of the writer's entries unique.
    """

    def __init__(self, folder: Path, token: str) -> None:
        self.folder = folder
        self.token = token
        self.lock_file = folder / f".saving-{token}.lock"
        self.written = folder / f".saving-{token}"
        self.moved_aside = folder / f".replaced-{token}"
        self._lock: int | None = None

    @classmethod
    def create(cls, folder: Path, target_name: str) -> _Entries:
        """Create the lock file of a new writer, and lock it."""
        entries = cls(folder, secrets.token_hex(8))
        entries._lock = _create_locked(entries.lock_file, target_name)
        return entries

    @classmethod
    def of_all_writers(cls, folder: Path) -> list[_Entries]:
        """Return the entries of all writers, alive or killed."""
        with suppress(OSError):
            found = [(entry, _LOCK_NAME.fullmatch(entry.name)) for entry in os.scandir(folder)]
            return [cls(folder, match[1]) for entry, match in found if match and entry.is_file(follow_symlinks=False)]
        return []

    def target_name(self) -> str:
        """Return the name that the lock file holds; "" if it is empty or invalid."""
        with open(open_regular(str(self.lock_file)), "rb") as file:
            name = os.fsdecode(file.read(_MAX_NAME_BYTES + 1))
        return "" if len(name) > _MAX_NAME_BYTES or "/" in name or "\0" in name or name in (".", "..") else name

    def lock_if_killed(self) -> bool:
        """Lock the lock file, if its writer was killed; a live writer holds its lock."""
        lock = os.open(self.lock_file, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def unlock(self) -> None:
        """Unlock explicitly, because a forked process may still hold a copy of the descriptor."""
        lock, self._lock = self._lock, None
        if lock is not None:
            _unlock(lock)

    def remove(self) -> None:
        """Restore the folder that was moved aside, remove the entries and unlock. Only for who holds the lock."""
        if self._lock is None:
            return
        with suppress(OSError):
            target = self.folder / self.target_name()
            if self.moved_aside.exists() and not target.exists():
                os.rename(self.moved_aside, target)
            shutil.rmtree(self.moved_aside, ignore_errors=True)
        shutil.rmtree(self.written, ignore_errors=True)
        with suppress(OSError):
            self.lock_file.unlink()
        self.unlock()


def find_interrupted_replacement(path: str) -> Folder | None:
    """Return the folder that holds what was at ``path`` if its writer was killed between two renames, or None.

    Such an interruption is possible only on file systems that cannot exchange two names atomically.
    """
    target = Path(os.path.realpath(os.path.expanduser(path)))
    for entries in _Entries.of_all_writers(target.parent):
        with suppress(OSError):
            if entries.target_name() == target.name and entries.moved_aside.exists():
                return LocalFolder(path, str(entries.moved_aside))
    return None


def clear_leftovers(folder: Path) -> None:
    """Remove what killed writers left in ``folder``."""
    for entries in _Entries.of_all_writers(folder):
        with suppress(OSError):
            if entries.lock_if_killed():
                entries.remove()


# Functions that make other changes to a folder of published folders. If a process is killed while it runs one of them,
# the next writer removes the leftover files.


def remove_folder(path: str) -> None:
    """Remove a folder. It is renamed first, so that it disappears in one step."""
    target = Path(os.path.realpath(path))
    if target.exists():
        entries = _Entries.create(target.parent, "")
        with suppress(FileNotFoundError):
            os.rename(target, entries.written)
        entries.remove()


def write_pointer(path: str, name: str) -> None:
    """Write a small file that holds a name. The write is atomic, even if several processes write at the same time."""
    target = Path(os.path.realpath(path))
    entries = _Entries.create(target.parent, name)
    try:
        os.replace(entries.lock_file, target)
    finally:
        entries.unlock()


def reserve_name(folder: str, choose: Callable[[Container[str]], str]) -> tuple[str, Callable[[], None]]:
    """Choose a name for a folder to publish and reserve it against other runs.

    Args:
        folder: the parent folder, on a local disk.
        choose: returns a name, given the names that other runs have reserved.

    Returns:
        The name, and a function that releases the name.
    """
    parent = Path(os.path.realpath(folder))
    with lock_folder(str(parent)):
        clear_leftovers(parent)
        reserved = set()
        for entries in _Entries.of_all_writers(parent):
            with suppress(FileNotFoundError):  # the writer has finished
                reserved.add(entries.target_name())
        name = choose(reserved)
        return name, _Entries.create(parent, name).remove


@contextmanager
def lock_folder(folder: str) -> Iterator[None]:
    """Lock a local folder, which is created, while a name in it is chosen; do nothing at a URL.

    Raises:
        OSError: the folder or its lock file cannot be created.
    """
    root = local_path(folder)
    if root is None:
        yield
        return
    os.makedirs(root, exist_ok=True)
    path = Path(root, _CLAIM_LOCK)
    lock = _create_locked(path, "")
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        _unlock(lock)


def lock_for_this_process(path: str) -> int | None:
    """Lock a file, which is created, until the returned descriptor is closed or this process ends.

    Returns:
        A descriptor; None on a file system without locks.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        # lockf locks belong to the process, so workers forked from a killed process do not hold them.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        os.close(lock)
        raise BlockingIOError(f"another process holds the lock of {path!r}") from error
    except OSError:
        os.close(lock)
        return None
    return lock


def _create_locked(path: Path, name: str) -> int:
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # On a file system without locks, the file stays unlocked; docs/checkpoint-format.md gives the consequences.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        # A concurrent cleanup may have removed the file before it was locked.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                os.write(lock, os.fsencode(name))
                return lock
        os.close(lock)


def _unlock(lock: int) -> None:
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)
