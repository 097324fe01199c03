"""Temporary folders. Creating a folder also removes the folders that dead processes have left."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
import weakref
from contextlib import suppress

_NAME = re.compile(r"drivetrain-[0-9a-f]{16}")
_LOCK = ".in-use"


class TemporaryFolder:
    """A new folder for this user in the system's temporary folder.

    A file in the folder is locked while the folder is in use. Forked processes hold the lock too. Before the folder is
    created, folders of this user that no process has locked are removed.

    Attributes:
        path: the path of the folder.
    """

    def __init__(self) -> None:
        root = tempfile.gettempdir()
        _clear(root)
        self.path, self._lock = _make_locked(root)
        self._remove = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def remove(self) -> None:
        """Remove the folder and its content."""
        self._remove()


def _make_locked(root: str) -> tuple[str, int]:
    while True:
        path = os.path.join(root, f"drivetrain-{os.urandom(8).hex()}")
        os.mkdir(path, 0o700)
        # Another process may remove the folder before it is locked. In this case, the loop tries a new name.
        with suppress(FileNotFoundError):
            lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with suppress(OSError):  # on a file system without locks, no folder is ever cleared
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(os.path.join(path, _LOCK)):
                return path, lock
            os.close(lock)


def _remove(path: str, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the process that made the folder
        return
    shutil.rmtree(path, ignore_errors=True)
    # The file is unlocked explicitly, because a forked process may hold a copy of the descriptor.
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _clear(root: str) -> None:
    """Remove the folders of this user that match `_NAME` and that no process has locked. Links are not followed."""
    with suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            with suppress(OSError):
                if _NAME.fullmatch(entry.name) and _is_own_folder(entry):
                    _clear_if_unlocked(entry.path)


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    status = entry.stat(follow_symlinks=False)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _clear_if_unlocked(path: str) -> None:
    try:
        lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        # The folder was never locked. Its creator has died, or will try another name. `rmdir` fails if the folder is
        # not empty.
        os.rmdir(path)
        return
    try:
        if stat.S_ISREG(os.fstat(lock).st_mode):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
