"""A checkpoint on a local disk: written into a folder beside, and renamed into its place in one step."""

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
from drivetrain.checkpoint._format.eager_file import EagerFile
from drivetrain.checkpoint._format.local_file import read_whole
from drivetrain.checkpoint._format.manifest import MANIFEST
from drivetrain.checkpoint._format.storage import JoinInfo, is_checkpoint_file
from drivetrain.errors import CheckpointError

# Beside the target, on the same file system: a folder that is being written, one that was moved out of the way, and
# the file that its writer holds locked. The lock file is there before the folders and goes after them, and holds the
# name of the target.
_MAX_NAME_BYTES = 1024  # bytes
_LOCK_NAME = re.compile(r"\.saving-[0-9a-f]{16}\.lock")
_CLAIM_LOCK = ".choosing.lock"  # a file, opened for writing: NFS locks nothing else


class LocalStorage:
    """A folder that becomes a checkpoint.

    Args:
        target: where the checkpoint is to be.
        token: tells this writer's folders from all others.
        lock: the descriptor of the locked file, on rank 0.
    """

    def __init__(self, target: Path, token: str, lock: int | None = None) -> None:
        self._target = target
        self._token = token
        self._lock = lock
        self._folder = target.parent / f".saving-{token}"

    @classmethod
    def begin(cls, path: str, needed: int = 0, files: int = 0) -> LocalStorage:
        """Make the folder, and clear what dead writers left beside it.

        Args:
            path: where the checkpoint is to be.
            needed: bytes that all ranks are going to write, in so many ``files``.
            files: how many.

        Raises:
            CheckpointError: what is there now is no checkpoint, or the disk has no room for another.
            OSError: the folder cannot be made.
        """
        target = Path(os.path.realpath(path))
        _check_replaceable(target)
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
        """Write to the folder that rank 0 made."""
        return cls(Path(os.path.realpath(path)), join_info["token"])

    @property
    def join_info(self) -> JoinInfo:
        return {"token": self._token}

    def file_name(self, name: str) -> str:
        return name

    def open(self, name: str) -> EagerFile:
        return EagerFile(self._folder / name)

    def size(self, name: str) -> int:
        return (self._folder / name).stat().st_size

    def keep(self) -> None:
        """A folder that is not renamed is no checkpoint, and one that is has its name: nothing changes."""

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
            # Only a folder that holds something is in the way.
            if not self._target.is_dir() or not any(self._target.iterdir()):
                raise
        _check_replaceable(self._target)
        if exchange(str(self._folder), str(self._target)):
            return
        # Killed between these two, the old one is found through the lock file, see `find_interrupted_replacement`.
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
    """Return where the checkpoint of ``path`` is, if a writer died in the moment in which it had no name.

    That moment is there only where the disk cannot exchange two names in one step.
    """
    target = Path(os.path.realpath(path))
    for lock in _lock_files_in(target.parent):
        aside = _moved_aside_path(target.parent, _token(lock))
        with suppress(OSError):
            if _read_target_name(lock) == target.name and (aside / MANIFEST).exists():
                return str(aside)
    return None


# What else is done in a folder of checkpoints. Killed on the way, each leaves what the next save clears.


def remove_checkpoint(path: str) -> None:
    """Remove a checkpoint, in one step."""
    target = Path(os.path.realpath(path))
    if target.exists():
        token = secrets.token_hex(8)
        lock = _create_locked(_lock_file(target.parent, token), "")
        with suppress(FileNotFoundError):
            os.rename(target, target.parent / f".saving-{token}")
        _remove_leftovers(_lock_file(target.parent, token), lock)


def write_pointer(path: str, name: str) -> None:
    """Write a small file that holds a name, in one step, whoever else does so too."""
    target = Path(os.path.realpath(path))
    lock_file = _lock_file(target.parent, secrets.token_hex(8))
    lock = _create_locked(lock_file, name)
    try:
        os.replace(lock_file, target)
    finally:
        os.close(lock)


def claim_name(folder: str, free: Callable[[Container[str]], str]) -> tuple[str, Callable[[], None]]:
    """Choose a name for a checkpoint, and keep it from other runs.

    Args:
        folder: where it is to be.
        free: chooses, from the names that others have claimed and not written yet.

    Returns:
        the name, and what gives up the claim.
    """
    parent = Path(os.path.realpath(folder))
    parent.mkdir(parents=True, exist_ok=True)
    with lock_folder(parent):
        clear_leftovers(parent)
        name = free(_claimed_names(parent))
        lock_file = _lock_file(parent, secrets.token_hex(8))
        lock = _create_locked(lock_file, name)
    return name, lambda: _remove_leftovers(lock_file, lock)


def _claimed_names(folder: Path) -> set[str]:
    names = set()
    for lock in _lock_files_in(folder):
        with suppress(FileNotFoundError):  # it is whole by now
            names.add(_read_target_name(lock))
    return names


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep others out who choose a name in ``folder``, by a file that is there meanwhile.

    Raises:
        OSError: it cannot be written there.
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
    """Remove what dead writers left in ``folder``. Those who live hold their locks, and keep theirs."""
    for path in _lock_files_in(folder):
        with suppress(OSError):
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
            else:
                _remove_leftovers(path, lock)


def _lock_files_in(folder: Path) -> list[Path]:
    with suppress(OSError):
        entries = [entry for entry in os.scandir(folder) if _LOCK_NAME.fullmatch(entry.name)]
        return [Path(entry.path) for entry in entries if entry.is_file(follow_symlinks=False)]
    return []


def _read_target_name(lock_file: Path) -> str:
    """The name that a lock file holds; "" where it holds none."""
    name = os.fsdecode(read_whole(lock_file, _MAX_NAME_BYTES + 1))
    return "" if len(name) > _MAX_NAME_BYTES or "/" in name or "\0" in name or name in (".", "..") else name


def _remove_leftovers(lock_file: Path, lock: int) -> None:
    """Remove the folders that ``lock_file`` stands for, and it too; ``lock`` is closed."""
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
    """By hand, since a process that was forked meanwhile holds a copy of the descriptor."""
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
        with suppress(OSError):  # a disk that knows no locks: docs/checkpoints.md says what holds then
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Somebody who clears leftovers may have been quicker, and has removed what we hold now.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                os.write(lock, os.fsencode(name))
                return lock
        os.close(lock)


def _check_replaceable(target: Path) -> None:
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
            f"{str(target)!r} holds {', '.join(foreign[:5]) or 'files without a manifest'}, which is no part of a "
            "checkpoint.",
            "saving onto a path replaces all that is there.",
            "save to another path, or move these files away.",
        )


def sync_folder(folder: Path) -> None:
    """Have the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network disks know it for files alone
            raise
    finally:
        os.close(descriptor)
