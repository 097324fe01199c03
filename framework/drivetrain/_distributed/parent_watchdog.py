"""Ends a child process when its parent dies, so that no orphans are left."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time


def die_with_parent(parent: int | None = None) -> None:
    """End this process when its parent dies, for whatever reason, within a second.

    The parent is polled. Linux's parent-death signal comes when the thread ends that started this process.

    Args:
        parent: the process id of the parent. If this process has another parent by now, this process exits at once.
    """
    parent = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="drivetrain-lifeline", daemon=True).start()


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
