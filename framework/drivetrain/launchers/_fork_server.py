"""Lets the server of the start method "forkserver" survive preemption signals. Only the server imports this module.

A scheduler signals the whole process group. Without the server, the caller would not learn how its ranks or its workers
ended, and would end them. A process that the server forks receives these signals once it has been set up, so that a
worker has left the process group by then.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.util import register_after_fork

_NUMBERS = (signal.SIGTERM, signal.SIGUSR1)
_previous = {number: signal.signal(number, signal.SIG_IGN) for number in _NUMBERS}
# `starting_workers` has started the server with these signals blocked.
signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)
_is_server = True


def _restore_in_child() -> None:
    """Restore the handlers in a process that the server has forked, but not in the processes that this one forks."""
    if _previous:
        signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
    while _previous:
        signal.signal(*_previous.popitem())


def _unblock_in_child(_: object) -> None:
    """Unblock the signals in a process that the server has forked, when it has loaded what it runs."""
    global _is_server
    if _is_server and not _previous:
        _is_server = False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)


os.register_at_fork(after_in_child=_restore_in_child)
register_after_fork(_restore_in_child, _unblock_in_child)
