"""Lets the server of the start method "forkserver" survive preemption signals. Only the server imports this module.

A scheduler signals the whole process group. Without the server, the caller would not learn how its ranks ended, and
would end them.
"""

from __future__ import annotations

import os
import signal

_NUMBERS = (signal.SIGTERM, signal.SIGUSR1)
_previous = {number: signal.signal(number, signal.SIG_IGN) for number in _NUMBERS}


def _restore_in_child() -> None:
    """Restore the handlers in a process that the server has forked, but not in the processes that this one forks."""
    while _previous:
        signal.signal(*_previous.popitem())


os.register_at_fork(after_in_child=_restore_in_child)
