"""What the processes that read data need: room for the names of their sockets, and no preemption signals.

A scheduler signals the whole process group. The run still needs its workers then, to reach the end of a step and save a
checkpoint. Each worker therefore leaves the process group. Until it has done so, it does not receive these signals:
they are blocked in the thread that starts workers, and new processes inherit this.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch.multiprocessing

from drivetrain.errors import ConfigurationError

# These are the signals of `preemption_signals="auto"`, as far as the platform has them.
_SIGNALS = {getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)}

_SERVER_MODULE = "drivetrain.launchers._fork_server"

# Maximum number of bytes of a socket's path: the size of `sun_path` without the final zero byte.
_MAX_SOCKET_PATH = 107 if sys.platform == "linux" else 103
# Number of bytes that multiprocessing appends to the temporary folder's path.
_SUFFIX_LENGTH = len("/pymp-xxxxxxxx") + len("/listener-xxxxxxxx")


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


def check_temporary_folder(num_workers: int) -> None:
    """Check that the temporary folder's path leaves room for the workers' socket names.

    Otherwise each worker would print ``AF_UNIX path too long``, and the run would wait for its batches forever.

    Args:
        num_workers: the number of workers, for the error.

    Raises:
        ConfigurationError: the path is too long.
    """
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]
        return
    if hasattr(multiprocessing.util, "_get_base_temp_dir"):
        return  # This version of Python chooses another folder if the path is too long.
    process_folder = getattr(multiprocessing.process.current_process(), "_config", {}).get("tempdir")
    folder = os.path.dirname(process_folder) if process_folder else tempfile.gettempdir()
    length = len(os.fsencode(folder))
    if length + _SUFFIX_LENGTH > _MAX_SOCKET_PATH:
        raise ConfigurationError(
            f"num_workers={num_workers} is not possible with temporary files in {folder!r}, a path of {length} bytes.",
            f"workers send tensors through sockets in that folder, whose paths may have at most {_MAX_SOCKET_PATH} "
            "bytes: the run would wait for the first batch forever.",
            f"set TMPDIR to a folder whose path has at most {_MAX_SOCKET_PATH - _SUFFIX_LENGTH} bytes, such as /tmp, "
            "before Python starts, or use num_workers=0.",
        )
