"""Writes a checkpoint to a local disk, into a temporary folder that is renamed when it is complete."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from drivetrain.checkpoint._format.atomic_exchange import exchange
from drivetrain.checkpoint._format.disk_space import check_disk_space
from drivetrain.checkpoint._format.local_file import read_whole
from drivetrain.checkpoint._format.manifest import MANIFEST
from drivetrain.checkpoint._format.storage import JoinInfo, is_checkpoint_file
from drivetrain.checkpoint._format.writeback_file import WritebackFile
from drivetrain.errors import CheckpointError

# A writer uses three entries in the target's parent folder: `.saving-<token>` (being written), `.replaced-<token>` (the
# old checkpoint, moved aside) and a lock file that holds the target's name. The lock file is created first and removed
# last.
_MAX_NAME_BYTES = 1024
_LOCK_NAME = re.compile(r"\.saving-[0-9a-f]{16}\.lock")
# This file is locked while a name is chosen. It is opened for writing, because NFS requires that for a lock.
_CLAIM_LOCK = ".choosing.lock"


class LocalStorage:
    """A temporary folder that becomes a checkpoint when it is committed.

    Args:
        target: path of the checkpoint.
        token: random text that makes the names of this writer's folders unique.
        lock: descriptor of the locked file, on rank 0; None on other ranks.
    """

    def __init__(self, target: Path, token: str, lock: int | None = None) -> None:
        self._target = target
        self._token = token
        self._lock = lock
        self._folder = target.parent / f".saving-{token}"

    @classmethod
    def begin(cls, path: str, needed: int = 0, files: int = 0) -> LocalStorage:
        """Create the temporary folder, and clean up what killed writers left in the parent folder.

        Args:
            path: path of the checkpoint.
            needed: number of bytes that all ranks will write.
            files: number of files that all ranks will write.

        Raises:
            CheckpointError: the target exists and is not a checkpoint, or the disk is too full.
            OSError: the folder cannot be created.
        """
        target = Path(os.path.realpath(path))
        _check_is_checkpoint(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(target.parent)
        check_disk_space(target, needed, files)
        token = secrets.token_hex(8)
        lock = _create_locked(_lock_file(target.parent, token), target.name)
        storage = cls(target, token, lock)
        try:
            storage._folder.mkdir()
        except BaseException:
            storage.abandon()
            raise
        return storage

    @classmethod
    def join(cls, path: str, join_info: JoinInfo) -> LocalStorage:
        """Return the storage that rank 0 began."""
        return cls(Path(os.path.realpath(path)), join_info["token"])

    @property
    def join_info(self) -> JoinInfo:
        return {"token": self._token}

    def file_name(self, name: str) -> str:
        return name

    def open(self, name: str) -> WritebackFile:
        return WritebackFile(self._folder / name)

    def size(self, name: str) -> int:
        return (self._folder / name).stat().st_size

    def keep(self) -> None:
        """Do nothing, because an uncommitted folder is never a checkpoint and a committed folder has been renamed."""

    def commit(self, manifest: bytes, identifier: str) -> None:
        with self.open(MANIFEST) as stream:
            stream.write(manifest)
        sync_folder(self._folder)
        self._move_into_place()
        sync_folder(self._target.parent)
        self._clean_up()

    def abandon(self) -> None:
        self._clean_up()

    def _move_into_place(self) -> None:
        try:
            os.rename(self._folder, self._target)
            return
        except OSError:
            # Renaming fails if the target is a folder with content. In that case the two folders are exchanged.
            if not self._target.is_dir() or not any(self._target.iterdir()):
                raise
        _check_is_checkpoint(self._target)
        if exchange(str(self._folder), str(self._target)):
            return
        # If this process is killed between the renames, `find_interrupted_replacement` finds the old checkpoint.
        aside = _moved_aside_path(self._target.parent, self._token)
        os.rename(self._target, aside)
        try:
            os.rename(self._folder, self._target)
        except BaseException:
            os.rename(aside, self._target)
            raise

    def _clean_up(self) -> None:
        if self._lock is not None:
            _remove_leftovers(_lock_file(self._target.parent, self._token), self._lock)
            self._lock = None


def find_interrupted_replacement(path: str) -> str | None:
    """Return the folder that holds the checkpoint of ``path`` if its writer was killed between two renames, or None.

    Such an interruption is possible only on file systems that cannot exchange two names atomically.
    """
    target = Path(os.path.realpath(path))
    for lock in _find_lock_files(target.parent):
        aside = _moved_aside_path(target.parent, _token(lock))
        with suppress(OSError):
            if _read_target_name(lock) == target.name and (aside / MANIFEST).exists():
                return str(aside)
    return None


# Functions that make other changes to a folder of checkpoints. If a process is killed while it runs one of them, the
# next save removes the leftover files.


def remove_checkpoint(path: str) -> None:
    """Remove a checkpoint. Its folder is renamed first, so that the checkpoint disappears in one step."""
    target = Path(os.path.realpath(path))
    if target.exists():
        token = secrets.token_hex(8)
        lock = _create_locked(_lock_file(target.parent, token), "")
        with suppress(FileNotFoundError):
            os.rename(target, target.parent / f".saving-{token}")
        _remove_leftovers(_lock_file(target.parent, token), lock)


def write_pointer(path: str, name: str) -> None:
    """Write a small file that holds a name. The write is atomic, even if several processes write at the same time."""
    target = Path(os.path.realpath(path))
    lock_file = _lock_file(target.parent, secrets.token_hex(8))
    lock = _create_locked(lock_file, name)
    try:
        os.replace(lock_file, target)
    finally:
        os.close(lock)


def claim_name(folder: str, choose: Callable[[Container[str]], str]) -> tuple[str, Callable[[], None]]:
    """Choose a name for a checkpoint and reserve it against other runs.

    Args:
        folder: the folder of checkpoints.
        choose: returns a name, given the names that other runs have reserved.

    Returns:
        The name, and a function that releases the name.
    """
    parent = Path(os.path.realpath(folder))
    parent.mkdir(parents=True, exist_ok=True)
    with lock_folder(parent):
        clear_leftovers(parent)
        name = choose(_claimed_names(parent))
        lock_file = _lock_file(parent, secrets.token_hex(8))
        lock = _create_locked(lock_file, name)
    return name, lambda: _remove_leftovers(lock_file, lock)


def _claimed_names(folder: Path) -> set[str]:
    names = set()
    for lock in _find_lock_files(folder):
        with suppress(FileNotFoundError):  # the lock file's writer has finished
            names.add(_read_target_name(lock))
    return names


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a lock file in ``folder`` while a name is chosen in this folder.

    Raises:
        OSError: the lock file cannot be written.
    """
    path = folder / _CLAIM_LOCK
    lock = _create_locked(path, "")
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        _unlock(lock)


def clear_leftovers(folder: Path) -> None:
    """Remove what killed writers left in ``folder``. Live writers hold their locks, so their files are kept."""
    for path in _find_lock_files(folder):
        with suppress(OSError):
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
            else:
                _remove_leftovers(path, lock)


def _find_lock_files(folder: Path) -> list[Path]:
    with suppress(OSError):
        entries = [entry for entry in os.scandir(folder) if _LOCK_NAME.fullmatch(entry.name)]
        return [Path(entry.path) for entry in entries if entry.is_file(follow_symlinks=False)]
    return []


def _read_target_name(lock_file: Path) -> str:
    """Return the name stored in a lock file; "" if it is empty or invalid."""
    name = os.fsdecode(read_whole(lock_file, _MAX_NAME_BYTES + 1))
    return "" if len(name) > _MAX_NAME_BYTES or "/" in name or "\0" in name or name in (".", "..") else name


def _remove_leftovers(lock_file: Path, lock: int) -> None:
    """Remove a writer's lock file and folders, restore the checkpoint that it moved aside, and close ``lock``."""
    folder, token = lock_file.parent, _token(lock_file)
    with suppress(OSError):
        target, aside = folder / _read_target_name(lock_file), _moved_aside_path(folder, token)
        if aside.exists() and not target.exists():
            os.rename(aside, target)
        shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(folder / f".saving-{token}", ignore_errors=True)
    with suppress(OSError):
        lock_file.unlink()
    _unlock(lock)


def _unlock(lock: int) -> None:
    """Unlock explicitly, because a forked process may still hold a copy of the descriptor."""
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _lock_file(folder: Path, token: str) -> Path:
    return folder / f".saving-{token}.lock"


def _moved_aside_path(folder: Path, token: str) -> Path:
    return folder / f".replaced-{token}"


def _token(lock_file: Path) -> str:
    return lock_file.name.removeprefix(".saving-").removesuffix(".lock")


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


def _check_is_checkpoint(target: Path) -> None:
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise CheckpointError(
            f"{str(target)!r} is a file.", "a checkpoint is a folder.", "save to another path, or move the file away."
        )
    names = sorted(os.listdir(target))
    foreign = [name for name in names if not is_checkpoint_file(name)]
    if names and (foreign or MANIFEST not in names):
        raise CheckpointError(
            f"{str(target)!r} holds {', '.join(foreign[:5]) or 'files without a manifest'}, which is not part of a "
            "checkpoint.",
            "saving to a path replaces everything in it.",
            "save to another path, or move these files away.",
        )


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)
