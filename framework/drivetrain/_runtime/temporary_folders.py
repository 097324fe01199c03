"""A temporary folder that is gone after its process, however that ended: the next one clears what the dead left."""

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


class Scratch:
    """A new folder below the system's temporary one, for this user alone.

    As long as it is in use, a file in it is locked; processes that are forked meanwhile hold the lock too. What
    others have left whose locks nobody holds is removed before it is made.

    Attributes:
        path: of the folder.
    """

    def __init__(self) -> None:
        root = tempfile.gettempdir()
        _clear(root)
        self.path, self._lock = _made(root)
        self._remove = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def remove(self) -> None:
        """Remove the folder and all that is in it."""
        self._remove()


def _made(root: str) -> tuple[str, int]:
    while True:
        path = os.path.join(root, f"drivetrain-{os.urandom(8).hex()}")
        os.mkdir(path, 0o700)
        # Whoever clears may come before the lock: then it is gone, and there is another name.
        with suppress(FileNotFoundError):
            lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with suppress(OSError):  # a disk that knows no locks: nobody can lock, and nobody clears anything
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(os.path.join(path, _LOCK)):
                return path, lock
            os.close(lock)


def _remove(path: str, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked copy of who made it
        return
    shutil.rmtree(path, ignore_errors=True)
    # By hand, since a process that was forked meanwhile may hold a copy of the descriptor.
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _clear(root: str) -> None:
    """Remove folders of this user that are called and locked as above, by nobody who lives. Never follows a link."""
    with suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            with suppress(OSError):
                if _NAME.fullmatch(entry.name) and _is_own_folder(entry):
                    _clear_one(entry.path)


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    found = entry.stat(follow_symlinks=False)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _clear_one(path: str) -> None:
    try:
        lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        os.rmdir(path)  # its maker died in between, or makes another; where something is in it, it is no folder of ours
        return
    try:
        if stat.S_ISREG(os.fstat(lock).st_mode):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
