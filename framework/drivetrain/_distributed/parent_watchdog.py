"""Ends a child process when its parent dies, so that no orphans are left."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None, *, from_thread: bool = False) -> None:
    """End this process when its parent dies, for whatever reason, within a second.

    Args:
        parent: the process id of the parent. If this process has another parent by now, this process exits at once.
        from_thread: True if a thread other than the main thread started this process. Linux sends the parent-death
            signal when the starting thread ends, so in this case the parent is polled instead.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux" and not from_thread:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), name="drivetrain-lifeline", daemon=True).start()
    # The parent may have died before the watchdog was set up.
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def die_with_caller() -> None:
    """End this process when the process that called the fork server for it dies.

    The fork server itself, which is the parent, lives as long as one of the processes that it has forked.
    """

    def watch() -> None:
        caller = multiprocessing.parent_process()
        if caller is not None:
            caller.join()
            os._exit(1)

    threading.Thread(target=watch, name="drivetrain-lifeline", daemon=True).start()
