"""Exchanges the names of two folders in one system call, if the system supports it."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from collections.abc import Callable

_RENAME_EXCHANGE = 2  # linux/fs.h
_RENAME_SWAP = 2  # macOS, sys/stdio.h
_AT_FDCWD = -100
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def exchange(first: str, second: str) -> bool:
    """Swap two paths on one file system atomically; return False if the system or file system does not support it.

    Raises:
        OSError: the exchange is supported, but failed.
    """
    call = _system_call()
    if call is None:
        return False
    if call(os.fsencode(first), os.fsencode(second)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), first, None, second)


@functools.cache
def _system_call() -> Callable[[bytes, bytes], int] | None:
    library = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux" and hasattr(library, "renameat2"):
        return lambda first, second: int(library.renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE))
    if sys.platform == "darwin" and hasattr(library, "renamex_np"):
        return lambda first, second: int(library.renamex_np(first, second, _RENAME_SWAP))
    return None
