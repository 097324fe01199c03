"""Detects changes of the process state that a function does not undo."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading

import torch
import torch.distributed as dist

# Dynamo, which torch's optimizers import at their first step, sets the first variable. Pytest sets the second.
_IGNORED_VARIABLES = frozenset({"TORCHINDUCTOR_CACHE_DIR", "PYTEST_CURRENT_TEST"})


class ProcessSnapshot:
    """A snapshot of the process state, for comparison with a later state.

    The snapshot covers what `Fit` promises not to change: the default process group, environment variables, the default
    dtype, grad mode, the working directory, non-daemon threads and child processes.
    """

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._dtype = torch.get_default_dtype()
        self._grad = torch.is_grad_enabled()
        self._folder = _working_directory()
        self._threads = set(_non_daemon_threads())
        self._children = {child.pid for child in multiprocessing.active_children()}

    def restore(self) -> list[str]:
        """Restore what has changed and can be restored, and return a description of every change."""
        changes = []
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
            changes.append("a default process group")
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
            changes.append("another default dtype")
        if torch.is_grad_enabled() != self._grad:
            torch.set_grad_enabled(self._grad)
            changes.append("another grad mode")
        if _working_directory() != self._folder:
            os.chdir(self._folder)
            changes.append("another working directory")
        names = self._restore_variables()
        if names:
            changes.append(f"changed environment variables: {', '.join(sorted(names))}")
        return changes

    def still_running(self) -> list[str]:
        """Return a description of every thread and child process that was started since the snapshot.

        If there are any, garbage is collected first, because a data loader in a reference cycle stops its persistent
        workers only when the loader is collected.
        """
        if self._new_threads_and_children():
            gc.collect()
        return self._new_threads_and_children()

    def _new_threads_and_children(self) -> list[str]:
        threads = [f"the thread {thread.name!r}" for thread in _non_daemon_threads() if thread not in self._threads]
        children = [
            f"the child process {child.name!r}"
            for child in multiprocessing.active_children()
            if child.pid not in self._children
        ]
        return threads + children

    def _restore_variables(self) -> set[str]:
        """Restore the environment variables and return the names of those that had changed."""
        before, current = self._environment, os.environ
        changed = {name for name in before.keys() | current.keys() if before.get(name) != current.get(name)}
        names = changed - _IGNORED_VARIABLES
        for name in names:
            current.pop(name, None)
            if name in before:
                current[name] = before[name]
        return names


def _non_daemon_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if not thread.daemon and thread.is_alive()]


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""  # the directory was removed
