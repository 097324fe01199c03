"""Starts processes with torch's elastic multiprocessing. What is private in it is used here and nowhere else."""

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
from drivetrain._runtime.temporary_folders import Scratch

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

LEFT = "left"
"""Prefix of the store's keys under which ranks leave failures that they could not write to a file."""

_POLL = 0.02  # seconds between two looks at the processes
_KILL_AFTER = 5  # seconds from SIGTERM to SIGKILL
_LOGGERS = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")


class Processes:
    """The processes of one node that we started, in the order of their local ranks.

    Args:
        first_rank: the global rank of the first of them; the others follow.
        context: elastic's.
        scratch: where they leave their failures; removed at the end.
    """

    def __init__(self, first_rank: int, context: PContext, scratch: Scratch) -> None:
        self._first_rank = first_rank
        self._context = context
        self._scratch = scratch
        self._failures: dict[int, Failure] = {}
        self._ended_by_us: set[int] = set()
        self.store: Store | None = None
        """Where those leave their failures that have no room for a file. Not held on to after the end."""

    @classmethod
    def of_script(cls, first_rank: int, command: list[str], variables: list[dict[str, str]]) -> Processes:
        """Start ``command`` once for each of ``variables``, which are added to this process's own."""
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
        # Only a run that starts processes pays for these imports.
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, MultiprocessContext, start_processes

        scratch = Scratch()
        try:
            # Starting them replaces this process's handlers of four signals, for good.
            with ProcessState(), _quiet(), warnings.catch_warnings():
                # From Python 3.12 on; whether it is safe to fork was looked at before.
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
                context._pc.join = _Join(context._pc)
            context._worker_finished_event = _Wake(context._worker_finished_event, len(arguments))  # type: ignore[assignment]
        return cls(first_rank, context, scratch)

    def exit_codes(self) -> dict[int, int | None]:
        """Return each rank's exit code: None while it runs, negative where a signal ended it."""
        from torch.distributed.elastic.multiprocessing import MultiprocessContext, SubprocessContext

        if isinstance(self._context, SubprocessContext):
            codes = [handler.proc.poll() for _, handler in sorted(self._context.subprocess_handlers.items())]
        else:
            assert isinstance(self._context, MultiprocessContext)
            started = self._context._pc
            codes = [process.exitcode for process in started.processes] if started is not None else []
        return {self._first_rank + index: code for index, code in enumerate(codes)}

    def failures(self) -> list[Failure]:
        """Return what is known of the ranks that failed: by what they left, else by their exit code."""
        for rank, code in self.exit_codes().items():
            if rank in self._ended_by_us or (rank in self._failures and self._failures[rank].exit_code is not None):
                continue
            left = self._left_by(rank) or (self._left_in_store(rank) if code else None)
            if left is not None:
                self._failures[rank] = left if code is None else left.ended_with(code)
            elif code:
                self._failures[rank] = Failure.of_exit(rank, code)
        return [self._failures[rank] for rank in sorted(self._failures)]

    def values(self) -> dict[int, Any] | None:
        """Return what each rank's function returned once all have, None before that.

        None too where one has failed: the others are to come out by themselves, and to leave what they know.
        """
        with _quiet():
            result = self._context.wait(timeout=0)
        if result is None:
            return None
        if result.is_failed():
            # One has failed since all have returned, and elastic has ended the others.
            failed = {self._first_rank + index for index in result.failures}
            self._ended_by_us |= {
                rank for rank, code in self.exit_codes().items() if self._was_told(rank, code)
            } - failed
            return None
        return {self._first_rank + index: value for index, value in result.return_values.items()}

    def _was_told(self, rank: int, code: int | None) -> bool:
        """Whether a rank ended because of SIGTERM, for which elastic has a handler in functions' processes."""
        left = self._left_by(rank)
        return code == -signal.SIGTERM or (left is not None and (left.error_type or "").endswith("SignalException"))

    def _left_by(self, rank: int) -> Failure | None:
        return Failure.read(failure_file(self._context.error_files[rank - self._first_rank]))

    def announce(self, failure: Failure) -> None:
        """Tell the others of a rank that ended and could not tell them itself."""
        with contextlib.suppress(RuntimeError):
            if self.store is not None:
                self.store.set(f"{LEFT}/first", failure.encode())

    def _left_in_store(self, rank: int) -> Failure | None:
        key = f"{LEFT}/{rank}"
        with contextlib.suppress(RuntimeError):
            if self.store is not None and self.store.check([key]):
                return Failure.decode(self.store.get(key))
        return None

    def send(self, number: int) -> None:
        """Send a signal to those that still run."""
        for rank, code in self.exit_codes().items():
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._context.pids()[rank - self._first_rank], number)

    def wait(self, seconds: float) -> bool:
        """Wait until all have ended, at most ``seconds``; tell whether they have."""
        return any(None not in self.exit_codes().values() for _ in polls(seconds))

    def end(self, *, kill: bool = False) -> None:
        """End those that still run, by SIGTERM and then SIGKILL, or at once; then remove what they left."""
        self._ended_by_us |= {rank for rank, code in self.exit_codes().items() if code is None}
        self.store = None
        with _quiet():
            self._context.close(signal.SIGKILL if kill else signal.SIGTERM, timeout=_KILL_AFTER)
        self._scratch.remove()
        started = getattr(self._context, "_pc", None)  # functions' processes, where they were started
        for path in getattr(started, "error_files", ()):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


class _Join:
    """Stands in for the `join` of torch's processes, which ends all others where it sees that one has failed.

    They get SIGTERM, which a run takes for a scheduler's and waits on, and SIGKILL after half a minute. And it reads
    what the failed one has left, of which a full disk holds half. While they work, a failure is left to our own look.
    """

    def __init__(self, processes: Any) -> None:
        self._processes = processes
        self._join = processes.join

    def __call__(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        if timeout is None:  # all have returned
            return bool(self._join(timeout, grace_period))
        sentinels = self._processes.sentinels
        for sentinel in wait(sentinels.keys(), timeout):
            process = self._processes.processes[sentinels[sentinel]]
            process.join()
            if process.exitcode == 0:
                del sentinels[sentinel]
        return not sentinels


class _Wake:
    """Sets the event that functions' processes wait for at their end, without waiting for them to wake up.

    One that was killed there never does, and `Event.set` would wait for ever.
    """

    def __init__(self, event: Any, waiting: int) -> None:
        self._event = event
        self._waiting = waiting

    def set(self) -> None:
        self._event._flag.release()
        for _ in range(self._waiting):
            self._event._cond._wait_semaphore.release()


def polls(seconds: float) -> Iterator[None]:
    """Yield now, and then every few milliseconds until ``seconds`` have passed."""
    until = time.monotonic() + seconds
    while True:
        yield
        if time.monotonic() >= until:
            return
        time.sleep(_POLL)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep elastic from logging, for people who never asked for it, what becomes an error of ours."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
