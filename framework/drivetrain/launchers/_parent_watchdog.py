"""Ties the life of a child process to its parent's, so that none is left when the parent is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None, *, from_thread: bool = False) -> None:
    """End this process, at the latest seconds after its parent has died, however the parent died.

    Args:
        parent: the parent's process id as the parent knew it. Where it is no longer the parent, it is dead already
            and this process ends at once.
        from_thread: whether another thread than the main one started this process. The kernel's signal then comes at
            that thread's end, and the parent's life has to be watched instead.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux" and not from_thread:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), name="drivetrain-lifeline", daemon=True).start()
    # It may have died before the tie was made.
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
