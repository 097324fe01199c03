"""Starts the processes of ranks, and supervises them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from drivetrain._distributed.failure import Failure, failure_file

FAILURES_PREFIX = "left"
"""Prefix of the store keys under which ranks report failures that they could not write to a file."""

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""The environment variable with the path of a rank's error file, which torchrun sets as well."""

_POLL = 0.02  # seconds between two checks of the processes
_KILL_AFTER = 5  # seconds from SIGTERM to SIGKILL


class Processes:
    """The worker processes that this process started on its node, by their global ranks."""

    def __init__(self) -> None:
        self._scratch = TemporaryDirectory(prefix="drivetrain-", ignore_cleanup_errors=True)  # for the error files
        self._processes: dict[int, subprocess.Popen[bytes] | BaseProcess] = {}
        self._pipes: dict[int, Connection] = {}
        self._values: dict[int, Any] = {}
        self._failures: dict[int, Failure] = {}
        self._terminated_ranks: set[int] = set()
        self.store: Store | None = None
        """The store in which ranks report failures that they could not write to a file. `end` sets it to None."""

    @classmethod
    def of_script(cls, first_rank: int, command: list[str], variables: list[dict[str, str]]) -> Processes:
        """Start ``command`` once for each mapping in ``variables``, which is added to the current environment.

        The processes have consecutive ranks, beginning with ``first_rank``.
        """
        processes = cls()
        with processes._ended_on_error():
            for rank, own in enumerate(variables, first_rank):
                environment = {**os.environ, **own, ERROR_FILE_VARIABLE: processes.error_file(rank)}
                # A separate session, so that `send` reaches what the script has started.
                process = subprocess.Popen(command, env=environment, start_new_session=True)
                processes._processes[rank] = process
        return processes

    @classmethod
    def of_function(
        cls, first_rank: int, fn: Callable[..., Any], arguments: list[tuple[Any, ...]], method: str
    ) -> Processes:
        """Call ``fn`` once with each of ``arguments``, in processes started by ``method``."""
        processes = cls()
        context: Any = multiprocessing.get_context(method)
        with processes._ended_on_error(), warnings.catch_warnings():
            # Python 3.12 and later warn about a fork, but `why_not_fork` has already checked that forking is safe.
            warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
            for rank, own in enumerate(arguments, first_rank):
                processes._pipes[rank], sender = context.Pipe(duplex=False)
                process = context.Process(target=_send_value, args=(fn, own, processes.error_file(rank), sender))
                process.start()
                processes._processes[rank] = process
                sender.close()
        return processes

    @contextlib.contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.end(kill=True)
            raise

    def error_file(self, rank: int) -> str:
        """Return the path of the error file of a rank."""
        return f"{self._scratch.name}/{rank}.json"

    def exit_codes(self) -> dict[int, int | None]:
        """Return each rank's exit code, which is None while the rank runs and negative if a signal ended the rank."""
        return {
            rank: process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
            for rank, process in self._processes.items()
        }

    def failures(self) -> list[Failure]:
        """Return the failures of the ranks, from their reports or else from their exit codes."""
        for rank, code in self.exit_codes().items():
            if rank in self._terminated_ranks or (
                rank in self._failures and self._failures[rank].exit_code is not None
            ):
                continue
            report = Failure.read(failure_file(self.error_file(rank))) or (self._read_store(rank) if code else None)
            if report is not None:
                self._failures[rank] = report if code is None else report.ended_with(code)
            elif code:
                self._failures[rank] = Failure.of_exit(rank, code)
        return [self._failures[rank] for rank in sorted(self._failures)]

    def values(self) -> dict[int, Any]:
        """Return the values that functions have returned, by rank. A process ends only after its value was read."""
        for rank, pipe in self._pipes.items():
            if rank not in self._values and pipe.poll():
                with contextlib.suppress(EOFError, OSError):  # the process has ended without a value
                    self._values[rank] = pipe.recv()
        return self._values

    def announce(self, failure: Failure) -> None:
        """Publish the failure of a rank to the other ranks, in case the failed rank could not report the failure."""
        with contextlib.suppress(RuntimeError):
            if self.store is not None:
                self.store.set(f"{FAILURES_PREFIX}/first", failure.encode())

    def _read_store(self, rank: int) -> Failure | None:
        key = f"{FAILURES_PREFIX}/{rank}"
        with contextlib.suppress(RuntimeError):
            if self.store is not None and self.store.check([key]):
                return Failure.decode(self.store.get(key))
        return None

    def send(self, number: int) -> None:
        """Send a signal to the running processes and, if they run a script, to what the script has started."""
        for rank, code in self.exit_codes().items():
            process = self._processes[rank]
            if code is None and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    (os.killpg if isinstance(process, subprocess.Popen) else os.kill)(process.pid, number)

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for all processes to end. Return True if all have ended."""
        for _ in polls(seconds):
            self.values()
            if None not in self.exit_codes().values():
                return True
        return False

    def end(self, *, kill: bool = False) -> None:
        """Terminate running processes and remove the error files of all processes.

        With ``kill``, the processes get SIGKILL at once. Otherwise they get SIGTERM, and after 5 seconds SIGKILL.
        """
        self._terminated_ranks |= {rank for rank, code in self.exit_codes().items() if code is None}
        self.store = None
        while self._pipes:
            self._pipes.popitem()[1].close()
        if not kill:
            self.send(signal.SIGTERM)
            self.wait(_KILL_AFTER)
        self.send(signal.SIGKILL)
        self.wait(float("inf"))
        self._scratch.cleanup()


def _send_value(fn: Callable[..., Any], arguments: tuple[Any, ...], error_file: str, sender: Connection) -> None:
    """Call ``fn`` in the started process, and send its return value to the caller."""
    os.environ[ERROR_FILE_VARIABLE] = error_file
    try:
        sender.send(fn(*arguments))
    except SystemExit:
        raise
    except BaseException:
        sys.exit(1)  # multiprocessing would print the error, which `fn` has reported to the caller


def polls(seconds: float) -> Iterator[None]:
    """Yield at once, and then every 20 milliseconds until ``seconds`` have passed."""
    until = time.monotonic() + seconds
    while True:
        yield
        if time.monotonic() >= until:
            return
        time.sleep(_POLL)
