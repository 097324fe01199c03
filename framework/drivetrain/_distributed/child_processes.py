"""The processes that this process starts for the ranks of its node: of a script, or of a function."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from tempfile import TemporaryDirectory
from typing import Any, Self

from drivetrain._distributed.failure import Failure, error_of, failure_file
from drivetrain._runtime.working_directory import working_directory

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""The environment variable with the path of a rank's error file, which torchrun sets as well."""

_POLL = 0.02  # seconds between two checks of the processes
_KILL_AFTER = 5  # seconds from SIGTERM to SIGKILL


class _Processes:
    """Started processes, by their global ranks."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes] | BaseProcess] = {}

    def exit_codes(self) -> dict[int, int | None]:
        """Return each rank's exit code, which is None while the rank runs and negative if a signal ended the rank."""
        return {
            rank: process.poll() if isinstance(process, subprocess.Popen) else process.exitcode
            for rank, process in self._processes.items()
        }

    def send(self, number: int) -> None:
        """Send a signal to the running processes and, if they run a script, to what the script has started."""
        for rank, code in self.exit_codes().items():
            process = self._processes[rank]
            if code is None and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    (os.killpg if isinstance(process, subprocess.Popen) else os.kill)(process.pid, number)

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for all processes to end. Return True if all have ended."""
        until = time.monotonic() + seconds
        while None in self.exit_codes().values():
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL)
        return True

    def end(self, *, kill: bool = False) -> None:
        """Terminate running processes with SIGTERM, and after 5 seconds with SIGKILL, or ``kill`` them at once."""
        if not kill:
            self.send(signal.SIGTERM)
            self.wait(_KILL_AFTER)
        self.send(signal.SIGKILL)
        self.wait(float("inf"))

    @contextlib.contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.end(kill=True)
            raise


class ScriptProcesses(_Processes):
    """Processes that run a command, and report their errors through files.

    Args:
        command: the command line.
        variables: for each rank, the variables that are added to the current environment.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[int, Mapping[str, str]]) -> None:
        super().__init__()
        self._error_files = TemporaryDirectory(prefix="drivetrain-", ignore_cleanup_errors=True)
        self._failures: dict[int, Failure] = {}
        self._terminated_ranks: set[int] = set()
        with self._ended_on_error():
            for rank, own in variables.items():
                environment = {**os.environ, **own, ERROR_FILE_VARIABLE: self._error_file(rank)}
                # A separate session, so that `send` reaches what the script has started.
                self._processes[rank] = subprocess.Popen(command, env=environment, start_new_session=True)

    def _error_file(self, rank: int) -> str:
        return f"{self._error_files.name}/{rank}.json"

    def failures(self) -> list[Failure]:
        """Return the failures of the ranks, from their reports or else from their exit codes."""
        for rank, code in self.exit_codes().items():
            known = self._failures.get(rank)
            if rank in self._terminated_ranks or (known is not None and known.exit_code is not None):
                continue
            report = Failure.read(failure_file(self._error_file(rank)))
            if report is not None:
                self._failures[rank] = report if code is None else replace(report, exit_code=code)
            elif code:
                self._failures[rank] = Failure.of_exit(rank, code)
        return [self._failures[rank] for rank in sorted(self._failures)]

    def end(self, *, kill: bool = False) -> None:
        self._terminated_ranks |= {rank for rank, code in self.exit_codes().items() if code is None}
        super().end(kill=kill)
        self._error_files.cleanup()


class FunctionProcesses(_Processes):
    """Processes that run a function, with a pipe to each.

    Args:
        function: called in the process of each rank, with the rank's arguments and its end of the pipe.
        arguments: the arguments of each rank.
        method: the start method of multiprocessing.
    """

    def __init__(self, function: Callable[..., None], arguments: Mapping[int, tuple[Any, ...]], method: str) -> None:
        super().__init__()
        self._pipes: dict[int, Connection] = {}
        context: Any = multiprocessing.get_context(method)
        with self._ended_on_error(), warnings.catch_warnings():
            # Python 3.12 and later warn about a fork, but `why_not_fork` has already checked that forking is safe.
            warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
            for rank, own in arguments.items():
                self._pipes[rank], pipe = context.Pipe()
                process = context.Process(target=function, args=(*own, pipe), name=f"rank-{rank}")
                process.start()
                self._processes[rank] = process
                pipe.close()

    def write(self, rank: int, message: object) -> None:
        """Send a message to a rank. If the rank has died, nothing is sent, and `messages` returns the failure."""
        with contextlib.suppress(OSError):
            self._pipes[rank].send(message)

    def messages(
        self,
        *,
        timeout: float = float("inf"),
        grace: float,
        on_failure: Callable[[Failure], None] = lambda failure: None,
    ) -> dict[int, Any]:
        """Return the next message of each rank, or a `Failure` for a rank that has ended without one.

        Args:
            timeout: seconds to wait. Ranks that have sent nothing until then are missing in the result.
            grace: seconds to wait for the other ranks once a rank has failed.
            on_failure: called with the first failure.
        """
        return collect(self._pipes, self._receive, timeout=timeout, grace=grace, on_failure=on_failure)

    def outcomes(self, *, grace: float, on_failure: Callable[[Failure], None]) -> dict[int, bytes | Failure]:
        """Return the only message of each rank, a failure or a value, after the processes have ended.

        Args:
            grace: seconds to wait for the other ranks once a rank has failed.
            on_failure: called with the first failure.
        """
        outcomes = self.messages(grace=grace, on_failure=on_failure)
        if len(outcomes) == len(self._pipes):
            has_failed = any(isinstance(outcome, Failure) for outcome in outcomes.values())
            self.wait(grace if has_failed else float("inf"))
        for rank, code in self.exit_codes().items():
            if code and not isinstance(outcomes.get(rank), Failure):
                outcomes[rank] = Failure.of_exit(rank, code)
        return outcomes

    def _receive(self, ranks: Collection[int], timeout: float) -> dict[int, Any]:
        codes = self.exit_codes()  # read before the pipes, because a process ends after it has sent its message
        wait([self._pipes[rank] for rank in ranks if codes[rank] is None], min(timeout, _POLL))
        received: dict[int, Any] = {}
        for rank in ranks:
            # Child processes of an ended rank may keep the pipe open, so that its end is not always noticed.
            with contextlib.suppress(EOFError, OSError):
                if self._pipes[rank].poll():
                    received[rank] = self._pipes[rank].recv()
            code = codes[rank]
            if rank not in received and code is not None:
                ended = Failure(rank, 0, message="ended before its function had returned")
                received[rank] = Failure.of_exit(rank, code) if code else ended
        return received

    def hang_up(self) -> None:
        """Close the pipes, which ends the processes that wait for a message."""
        while self._pipes:
            self._pipes.popitem()[1].close()

    def end(self, *, kill: bool = False) -> None:
        self.hang_up()
        super().end(kill=kill)


def collect(
    ranks: Collection[int],
    receive: Callable[[Collection[int], float], Mapping[int, Any]],
    *,
    timeout: float = float("inf"),
    grace: float,
    on_failure: Callable[[Failure], None] = lambda failure: None,
) -> dict[int, Any]:
    """Wait for the outcomes of ``ranks``. Once a rank has failed, wait for the others only ``grace`` seconds.

    Args:
        ranks: the ranks.
        receive: ``receive(ranks, seconds)`` waits at most ``seconds`` and returns the outcomes that have arrived of
            ``ranks``. The outcome of a rank that has failed is a `Failure`.
        timeout: seconds to wait.
        grace: seconds to wait for the other ranks after a failure.
        on_failure: called with the first failure.
    """
    outcomes: dict[int, Any] = {}
    deadline, has_failed = time.monotonic() + timeout, False
    while len(outcomes) < len(ranks) and (remaining := deadline - time.monotonic()) > 0:
        received = receive([rank for rank in ranks if rank not in outcomes], remaining)
        outcomes |= received
        failed = [outcome for outcome in received.values() if isinstance(outcome, Failure)]
        if failed and not has_failed:
            has_failed, deadline = True, min(deadline, time.monotonic() + grace)
            on_failure(failed[0])
    return outcomes


def all_or_raise(outcomes: Mapping[int, Any], world_size: int) -> list[Any]:
    """Return the outcomes of all ranks, by rank.

    Raises:
        BaseException: ranks have failed; see `error_of`.
    """
    failures = [outcome for outcome in outcomes.values() if isinstance(outcome, Failure)]
    if failures:
        raise error_of(failures, world_size)
    return [outcomes[rank] for rank in sorted(outcomes)]


def outcome_of(rank: int, call: Callable[[], Any]) -> bytes | Failure:
    """Call a function as ``rank`` and return its pickled value, or the failure.

    The value is pickled here, because multiprocessing would send a tensor as a handle, and the handle becomes invalid
    when the process ends.
    """
    try:
        return pickle.dumps(call())
    except BaseException as error:
        return Failure.of_exception(rank, error)


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Settings of this process that a process which it starts gets, however it is started.

    The fork server has the variables and the directory of the moment when the server was started. Without the caller's
    start method, DataLoader workers would be started like the process itself, import torch again, and take seconds.
    """

    variables: dict[str, str]
    folder: str | None
    start_method: str | None

    @classmethod
    def here(cls, variables: Mapping[str, str] | None = None) -> Self:
        """Return the settings of this process, with ``variables`` in addition."""
        method = multiprocessing.get_start_method(allow_none=True)
        return cls({**os.environ, **(variables or {})}, working_directory(), method)

    def apply(self) -> None:
        """Give this process the settings."""
        os.environ.clear()
        os.environ.update(self.variables)
        if self.folder is not None:
            os.chdir(self.folder)
        multiprocessing.set_start_method(self.start_method, force=True)


def suggested_threads(local_world_size: int) -> int:
    """Return the number of compute threads that gives each process of this node an equal share of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size)
