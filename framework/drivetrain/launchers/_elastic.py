"""Starts and supervises processes with torch's elastic multiprocessing.

Only this module uses the internals of elastic multiprocessing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from torch.distributed import Store  # type: ignore[attr-defined]

from drivetrain._distributed.failure import Failure, failure_file
from drivetrain._runtime.process_state import ProcessState
from drivetrain._runtime.temporary_folders import TemporaryFolder

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

FAILURES_PREFIX = "left"
"""Prefix of the store keys under which ranks report failures that they could not write to a file."""

_POLL = 0.02  # seconds between two checks of the processes
_KILL_AFTER = 5  # seconds from SIGTERM to SIGKILL
_LOGGERS = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")


class Processes:
    """The worker processes that this process started on its node, in the order of their local ranks.

    Args:
        first_rank: the global rank of the first process. The ranks of the other processes follow.
        context: the context of torch's elastic multiprocessing.
        scratch: the folder of the processes' error files. `end` removes the folder.
    """

    def __init__(self, first_rank: int, context: PContext, scratch: TemporaryFolder) -> None:
        self._first_rank = first_rank
        self._context = context
        self._scratch = scratch
        self._failures: dict[int, Failure] = {}
        self._terminated_ranks: set[int] = set()
        self.store: Store | None = None
        """The store in which ranks report failures that they could not write to a file. `end` sets it to None."""

    @classmethod
    def of_script(cls, first_rank: int, command: list[str], variables: list[dict[str, str]]) -> Processes:
        """Start ``command`` once for each mapping in ``variables``, which is added to the current environment."""
        arguments = {index: tuple(command[1:]) for index in range(len(variables))}
        return cls._start(first_rank, command[0], arguments, variables, "spawn")

    @classmethod
    def of_function(
        cls, first_rank: int, fn: Callable[..., Any], arguments: list[tuple[Any, ...]], method: str
    ) -> Processes:
        """Call ``fn`` once with each of ``arguments``, in processes started by ``method``."""
        return cls._start(first_rank, fn, dict(enumerate(arguments)), [{} for _ in arguments], method)

    @classmethod
    def _start(
        cls,
        first_rank: int,
        entrypoint: Callable[..., Any] | str,
        arguments: dict[int, tuple[Any, ...]],
        variables: list[dict[str, str]],
        method: str,
    ) -> Processes:
        # Elastic is imported here, because only a run that starts processes needs it.
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, MultiprocessContext, start_processes

        scratch = TemporaryFolder()
        try:
            # Torch replaces the handlers of four signals in this process and does not restore them.
            with ProcessState(), _silence_loggers(), warnings.catch_warnings():
                # Python 3.12 and later warn about a fork, but `why_not_fork` has already checked that forking is safe.
                warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
                context = start_processes(
                    name="drivetrain",
                    entrypoint=entrypoint,
                    args=arguments,
                    envs=dict(enumerate(variables)),
                    logs_specs=DefaultLogsSpecs(log_dir=scratch.path),
                    start_method=method,
                )
        except BaseException:
            scratch.remove()
            raise
        if isinstance(context, MultiprocessContext):
            if context._pc is not None:
                context._pc.join = _ReapingJoin(context._pc)
            context._worker_finished_event = _NonBlockingEvent(context._worker_finished_event, len(arguments))  # type: ignore[assignment]
        return cls(first_rank, context, scratch)

    def exit_codes(self) -> dict[int, int | None]:
        """Return each rank's exit code, which is None while the rank runs and negative if a signal ended the rank."""
        from torch.distributed.elastic.multiprocessing import MultiprocessContext, SubprocessContext

        if isinstance(self._context, SubprocessContext):
            codes = [handler.proc.poll() for _, handler in sorted(self._context.subprocess_handlers.items())]
        else:
            assert isinstance(self._context, MultiprocessContext)
            started = self._context._pc
            codes = [process.exitcode for process in started.processes] if started is not None else []
        return {self._first_rank + index: code for index, code in enumerate(codes)}

    def failures(self) -> list[Failure]:
        """Return the failures of the ranks, from their reports or else from their exit codes."""
        for rank, code in self.exit_codes().items():
            if rank in self._terminated_ranks or (
                rank in self._failures and self._failures[rank].exit_code is not None
            ):
                continue
            report = self._read_error_file(rank) or (self._read_store(rank) if code else None)
            if report is not None:
                self._failures[rank] = report if code is None else report.ended_with(code)
            elif code:
                self._failures[rank] = Failure.of_exit(rank, code)
        return [self._failures[rank] for rank in sorted(self._failures)]

    def values(self) -> dict[int, Any] | None:
        """Return the return value of each rank once all ranks have returned, and None before that.

        The result is also None after a failure, so that the other ranks have time to stop by themselves and to report.
        """
        with _silence_loggers():
            result = self._context.wait(timeout=0)
        if result is None:
            return None
        if result.is_failed():
            # A process failed after all ranks had returned, and elastic terminated the other processes.
            failed = {self._first_rank + index for index in result.failures}
            self._terminated_ranks |= {
                rank for rank, code in self.exit_codes().items() if self._ended_by_sigterm(rank, code)
            } - failed
            return None
        return {self._first_rank + index: value for index, value in result.return_values.items()}

    def _ended_by_sigterm(self, rank: int, code: int | None) -> bool:
        """Return True if SIGTERM ended the rank. In function processes, elastic handles SIGTERM by raising an error."""
        report = self._read_error_file(rank)
        return code == -signal.SIGTERM or (report is not None and (report.error_type or "").endswith("SignalException"))

    def _read_error_file(self, rank: int) -> Failure | None:
        return Failure.read(failure_file(self._context.error_files[rank - self._first_rank]))

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
        """Send the signal ``number`` to the processes that are still running."""
        for rank, code in self.exit_codes().items():
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._context.pids()[rank - self._first_rank], number)

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for all processes to end. Return True if all have ended."""
        return any(None not in self.exit_codes().values() for _ in polls(seconds))

    def end(self, *, kill: bool = False) -> None:
        """Terminate running processes and remove the error files of all processes.

        With ``kill``, the processes get SIGKILL at once. Otherwise they get SIGTERM, and after 5 seconds SIGKILL.
        """
        self._terminated_ranks |= {rank for rank, code in self.exit_codes().items() if code is None}
        self.store = None
        with _silence_loggers():
            self._context.close(signal.SIGKILL if kill else signal.SIGTERM, timeout=_KILL_AFTER)
        self._scratch.remove()
        started = getattr(self._context, "_pc", None)  # exists for function processes once they have started
        for path in getattr(started, "error_files", ()):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


class _ReapingJoin:
    """Replaces the `join` of torch's processes, which terminates all other processes when one has failed.

    The other processes would get SIGTERM, which a run takes for preemption, and SIGKILL half a minute later. Torch's
    `join` also reads the error file of the failed process, and this file is truncated if the disk is full. This class
    only reaps processes that have ended. `Processes.failures` detects failures.
    """

    def __init__(self, processes: Any) -> None:
        self._processes = processes
        self._join = processes.join

    def __call__(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        if timeout is None:  # all processes have returned
            return bool(self._join(timeout, grace_period))
        sentinels = self._processes.sentinels
        for sentinel in wait(sentinels.keys(), timeout):
            process = self._processes.processes[sentinels[sentinel]]
            process.join()
            if process.exitcode == 0:
                del sentinels[sentinel]
        return not sentinels


class _NonBlockingEvent:
    """Sets the event that function processes wait for before they exit, without waiting until these processes wake up.

    A process that was killed while waiting never wakes up, so `Event.set` would block forever.
    """

    def __init__(self, event: Any, waiting: int) -> None:
        self._event = event
        self._waiting = waiting

    def set(self) -> None:
        self._event._flag.release()
        for _ in range(self._waiting):
            self._event._cond._wait_semaphore.release()


def polls(seconds: float) -> Iterator[None]:
    """Yield at once, and then every 20 milliseconds until ``seconds`` have passed."""
    until = time.monotonic() + seconds
    while True:
        yield
        if time.monotonic() >= until:
            return
        time.sleep(_POLL)


@contextmanager
def _silence_loggers() -> Iterator[None]:
    """Silence elastic's loggers, since drivetrain reports the failures itself."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
