"""Runs functions on several ranks, one process each, and returns what every rank returned."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from drivetrain._distributed.failure import Failure, RankFailedError, first_cause
from drivetrain._distributed.rendezvous import host
from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError, DistributedError
from drivetrain.launchers._torchrun_variables import torchrun_variables
from drivetrain.launchers.function_launcher import PRELOAD
from drivetrain.testing._rank_process import ALL_RETURNED, STARTED, Call, Leftovers, serve

_START_LIMIT = 120.0  # seconds for the ranks to start, which includes an import of torch the first time
_EXIT_LIMIT = 10.0  # seconds for a rank to clean up after a call, and for its process to exit
_STACK_LIMIT = 3.0  # seconds for a late rank to dump its stacks
_GRACE = 0.3  # seconds to wait for further failures after the first one, to distinguish the cause from its consequences


class World:
    """Ranks that are started once and called many times: ``with World(2) as world: world.run(fn, 1.0)``.

    The first call starts the processes, which import torch and your modules; later calls take milliseconds. Each call
    begins with the same random generators, torch settings, environment and process groups. If a call changes one of
    them, or leaves threads or child processes behind, an error is raised. After a call that failed or timed out, all
    processes are ended and the next call starts new ones.

    Changes that cannot be undone, such as to class attributes or module globals, remain for later calls: run such
    functions in separate processes, with `run_distributed`.

    Args:
        nprocs: the number of ranks.
        preload: names of further modules that the fork server imports before it starts ranks. The first world or
            `run_distributed` of a process starts the fork server, and later ones reuse that server.
    """

    def __init__(self, nprocs: int, *, preload: Sequence[str] = ()) -> None:
        self.nprocs = nprocs
        self._preload = preload
        self._workers: list[_Worker] = []
        self._scratch: TemporaryDirectory[str] | None = None
        self._calls = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._kill()

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        process_group: str | None = "gloo",
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args)`` on every rank and return the list of the returned values, by rank.

        Ranks use one compute thread each, see the caller's current environment variables, working directory and
        ``sys.path``, and end when the caller ends.

        Args:
            fn: a function at the top level of a module, so that ranks can import it.
            args: the arguments of ``fn``. The arguments and the return values are pickled, so tensors are copied.
            process_group: the backend of a default process group that is created before ``fn`` runs and destroyed
                afterwards. With None, the ranks get torchrun's variables and a store hosted by the caller instead, and
                ``fn`` (or a `Fit` in it) creates its own group.
            timeout: seconds for the call, counted once all ranks have started.
            env: additional environment variables for the ranks.

        Raises:
            RankFailedError: a rank raised an exception or died. The error includes the traceback of the rank.
            DistributedError: the call timed out, or ``fn`` left something behind. After a timeout, the error includes
                the stacks of all ranks that are still running.
            ConfigurationError: ``fn`` or its arguments cannot be pickled.
        """
        outcomes, leftovers = self._call(fn, args, process_group, timeout, env)
        self._check(leftovers)
        return [pickle.loads(outcome) for outcome in outcomes]

    def _call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        process_group: str | None,
        timeout: float,
        env: Mapping[str, str] | None,
    ) -> tuple[list[bytes], dict[int, Leftovers]]:
        """Return the pickled return values of all ranks, and what each rank left behind."""
        work = _dump(fn, args)
        try:
            self._start()
            # With port 0 the operating system chooses a free port, which no other process can take in between.
            store = host("127.0.0.1", 0) if process_group is None else None
            self._send(work, process_group, timeout, {**os.environ, **(env or {})}, store)
            outcomes = self._collect(timeout)
            leftovers = self._collect_leftovers()
            del store
        except BaseException:
            self._kill()
            raise
        return outcomes, leftovers

    def close(self) -> None:
        """End the ranks.

        Raises:
            DistributedError: a rank did not end by itself, or ended with an exit code other than 0.
        """
        try:
            for worker in self._workers:
                worker.pipe.close()
            for worker in self._workers:
                worker.process.join(_EXIT_LIMIT)
                if worker.process.exitcode != 0:
                    raise _exit_error(worker)
        finally:
            self._kill()

    def _kill(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _start(self) -> None:
        if self._workers:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, "drivetrain.testing._rank_process", *self._preload])
        self._scratch = TemporaryDirectory(prefix="drivetrain-", ignore_cleanup_errors=True)
        for rank in range(self.nprocs):
            caller_end, rank_end = context.Pipe()
            process = context.Process(target=serve, args=(rank, self.nprocs, rank_end), name=f"rank-{rank}")
            self._workers.append(_Worker(rank, process, caller_end))
            process.start()
            rank_end.close()
        for worker, message in self._messages(time.monotonic() + _START_LIMIT):
            if isinstance(message, Failure):
                raise RankFailedError(message)
            assert message == STARTED, f"rank {worker.rank} began with {message!r}"

    def _send(
        self,
        work: bytes,
        process_group: str | None,
        timeout: float,
        variables: dict[str, str],
        store: TCPStore | None,
    ) -> None:
        assert self._scratch is not None
        self._calls += 1
        for worker in self._workers:
            rank_variables = {} if store is None else _rank_variables(worker.rank, self.nprocs, store.port)
            worker.stack_file = Path(self._scratch.name) / f"stack-{self._calls}-{worker.rank}.txt"
            worker.send(
                Call(
                    work,
                    {**variables, **rank_variables},
                    os.getcwd(),
                    list(sys.path),
                    multiprocessing.get_start_method(allow_none=True),
                    process_group,
                    f"{self._scratch.name}/rendezvous-{self._calls}",
                    timeout,
                    str(worker.stack_file),
                )
            )

    def _collect(self, timeout: float) -> list[bytes]:
        """Return the pickled return values of all ranks."""
        deadline = time.monotonic() + timeout
        outcomes: dict[int, Any] = {}
        for worker, outcome in self._messages(deadline):
            outcomes[worker.rank] = outcome
            if isinstance(outcome, Failure):
                deadline = min(deadline, time.monotonic() + _GRACE)
                late = [other for other in self._workers if other.rank not in outcomes]
                further = [answer for _, answer in self._messages(deadline, late)]
                raise RankFailedError(
                    first_cause(answer for answer in [outcome, *further] if isinstance(answer, Failure))
                )
        late = [worker for worker in self._workers if worker.rank not in outcomes]
        if late:
            raise _timeout_error(late, self.nprocs, timeout)
        return [outcomes[rank] for rank in range(self.nprocs)]

    def _collect_leftovers(self) -> dict[int, Leftovers]:
        for worker in self._workers:
            worker.send(ALL_RETURNED)
        answers = {worker.rank: answer for worker, answer in self._messages(time.monotonic() + _EXIT_LIMIT)}
        for worker in self._workers:
            answer = answers.get(worker.rank)
            if not isinstance(answer, Leftovers):
                raise _exit_error(worker)
        return answers

    def _check(self, leftovers: Mapping[int, Leftovers]) -> None:
        for rank, rank_leftovers in leftovers.items():
            if rank_leftovers.still_running:
                self._kill()
            descriptions = rank_leftovers.undone_changes + rank_leftovers.still_running
            if descriptions:
                raise DistributedError(
                    f"Rank {rank} returned but left behind {'; '.join(descriptions)}",
                    "these leftovers would affect the next function in the same process",
                    "restore or end them before the function returns",
                )

    def _messages(self, deadline: float, senders: Sequence[_Worker] | None = None) -> Iterator[tuple[_Worker, Any]]:
        """Yield one message from each rank as it arrives, with a `Failure` for a rank that died, until ``deadline``."""
        waiting: dict[Any, _Worker] = {
            worker.pipe: worker for worker in (self._workers if senders is None else senders)
        }
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for pipe in ready:
                worker = waiting.pop(pipe)
                yield worker, worker.receive()


def run_distributed(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    process_group: str | None = "gloo",
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``fn(*args)`` on ``nprocs`` newly started ranks and return the list of the returned values, by rank.

    The arguments and errors are those of `World.run`, except that the function may leave threads running and change its
    process permanently. Use `run_distributed` for functions with such side effects, and one `World` for many functions
    without side effects.

    Raises:
        DistributedError: as for `World.run`; also if a process did not end after the function returned, or ended with
            an exit code other than 0.
    """
    with World(nprocs) as world:
        outcomes, _ = world._call(fn, args, process_group, timeout, env)
    return [pickle.loads(outcome) for outcome in outcomes]


def _dump(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise ConfigurationError(
            f"cannot send {fn!r} with its arguments to other processes: {error}",
            "ranks are separate processes, and the function and its arguments are pickled to be sent",
            "use a function at the top level of a module, and arguments that can be pickled",
        ) from error


def _rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return torchrun_variables(Placement(rank, world_size, rank, world_size), "127.0.0.1", port)


@dataclass(slots=True)
class _Worker:
    """A rank as seen by the caller."""

    rank: int
    process: BaseProcess
    pipe: Connection
    stack_file: Path = field(default_factory=Path)

    def send(self, message: object) -> None:
        """Send a message to the rank. If the rank has died, nothing is sent, and `receive` returns the failure."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(message)

    def receive(self) -> Any:
        """Return the rank's message, or a failure if it has died."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return Failure.of_exit(self.rank, self.process.exitcode or 0, self._read_stacks())

    def dumped_stacks(self) -> str:
        """Return the stacks that a rank has dumped after the timeout, or "" if the file is still empty."""
        return self._read_stacks() if self.stack_file.is_file() else "(the function did not start)"

    def _read_stacks(self) -> str:
        return self.stack_file.read_text().strip() if self.stack_file.is_file() else ""

    def end(self) -> None:
        """Kill the process if it is still running."""
        self.pipe.close()
        if self.process.pid is not None:
            if self.process.is_alive():
                self.process.kill()
            self.process.join()


def _timeout_error(late: Sequence[_Worker], nprocs: int, timeout: float) -> DistributedError:
    deadline = time.monotonic() + _STACK_LIMIT
    while time.monotonic() < deadline and not all(worker.dumped_stacks() for worker in late):
        time.sleep(0.02)
    time.sleep(0.02)  # `faulthandler` writes a dump in several pieces
    stacks = [f"rank {worker.rank}:\n{worker.dumped_stacks() or '(no stacks)'}" for worker in late]
    return DistributedError(
        f"Rank {', '.join(str(worker.rank) for worker in late)} of {nprocs} did not return within {timeout:g} s",
        "stacks:\n" + "\n".join(stacks),
        "look for a collective that not every rank calls, or increase `timeout` if the function takes longer",
    )


def _exit_error(worker: _Worker) -> DistributedError:
    code = worker.process.exitcode
    detail = f"did not end within {_EXIT_LIMIT:g} s" if code is None else f"ended with code {code}"
    return DistributedError(
        f"Rank {worker.rank} returned, but its process {detail}",
        "something that the function started still exists: a thread, a process group or a child process",
        "stop all of these before the function returns",
    )
