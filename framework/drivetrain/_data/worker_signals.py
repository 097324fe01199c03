"""Keeps preemption signals away from the processes that read data, whichever start method starts them.

A scheduler signals the whole process group. The run still needs its workers then, to reach the end of a step and save a
checkpoint. Each worker therefore leaves the process group. Until it has done so, it does not receive these signals:
they are blocked in the thread that starts workers, and new processes inherit this.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

# These are the signals of `preemption_signals="auto"`, as far as the platform has them.
_SIGNALS = {getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)}

_SERVER_MODULE = "drivetrain.launchers._fork_server"


@contextlib.contextmanager
def starting_workers(context: Any) -> Iterator[None]:
    """Block preemption signals in this thread and in the processes that it starts. They arrive afterwards.

    Args:
        context: the ``multiprocessing_context`` of a `DataLoader`; None for the default start method.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows has no process groups.
        yield
        return
    method = (context or multiprocessing).get_start_method()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        if method != "fork":
            from multiprocessing import resource_tracker  # imported only for these start methods

            # Starting the tracker unblocks SIGTERM in Python 3.11, so it is started first.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        if method == "forkserver":
            _preload_in_server()
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_process_group() -> None:
    """Move this worker to its own process group, and drop the preemption signals that were sent to the run's group."""
    with contextlib.suppress(OSError, AttributeError):  # The platform has no process groups.
        os.setpgid(0, 0)
    if is_starting():
        while pending := signal.sigpending() & _SIGNALS:
            signal.sigwait(pending)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def is_starting() -> bool:
    """Return whether this process was started by `starting_workers` and has not left the process group yet."""
    return hasattr(signal, "pthread_sigmask") and signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _preload_in_server() -> None:
    """Make the fork server ignore these signals itself, if it does not run yet.

    `multiprocessing.set_forkserver_preload` would replace the modules that the user has chosen.
    """
    from multiprocessing import forkserver

    modules = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    if _SERVER_MODULE not in modules:
        modules.append(_SERVER_MODULE)
