"""Calls functions on several ranks, each a process of its own, and returns what every rank returned."""

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
from types import TracebackType
from typing import Any, Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from drivetrain._distributed.failure import Failure, RankFailedError, first_cause
from drivetrain._distributed.rendezvous import host
from drivetrain._runtime.temporary_folders import Scratch
from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError, DistributedError
from drivetrain.launchers._torchrun_variables import torchrun_variables
from drivetrain.launchers.function_launcher import PRELOAD
from drivetrain.testing._rank_process import ALL_RETURNED, STARTED, Call, Leftovers, serve

_START_LIMIT = 120.0  # seconds for the ranks to come up; the first time torch has to be imported
_EXIT_LIMIT = 10.0  # seconds for a rank to tidy up after a call, and for its process to end
_STACK_LIMIT = 3.0  # seconds in which a rank that is late says where it is
_GRACE = 0.3  # seconds in which further ranks may report after the first failure, to tell the cause from its effects


class World:
    """Ranks that are started once and called many times: ``with World(2) as world: world.run(fn, 1.0)``.

    A process starts and imports torch and your modules at the first call; the calls after it cost milliseconds. Each
    begins with random generators, defaults, environment and process groups as the first did. What it leaves behind
    there, in a thread or in a child process is an error. After a call that failed or did not return in time all
    processes are ended; the next call starts new ones.

    A function that changes what no call can put back, such as a class's attributes or a module's globals, changes it
    for the functions after it: give it processes of its own, with `run_distributed`.

    Args:
        nprocs: the number of ranks.
        preload: further modules that the fork server imports before it starts ranks, by name. The first world or
            `run_distributed` of a process starts that server; later ones use it as it is.
    """

    def __init__(self, nprocs: int, *, preload: Sequence[str] = ()) -> None:
        self.nprocs = nprocs
        self._preload = preload
        self._workers: list[_Worker] = []
        self._scratch: Scratch | None = None
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
        """Call ``fn(*args)`` on every rank and return the list of what each returned, by rank.

        Ranks compute on one thread each, see the caller's environment variables, working directory and ``sys.path`` as
        they are now, and never outlive the caller.

        Args:
            fn: a function at the top level of a module, so that ranks can import it.
            args: pickled for every rank; so is what ``fn`` returns. Tensors are copied, not shared.
            process_group: the backend of a default process group that is made before ``fn`` and destroyed after it.
                None makes none: ranks get the variables that torchrun sets instead, with the store hosted by the
                caller, and ``fn`` (or a `Fit` in it) makes its own.
            timeout: seconds for the call, counted once all ranks have started.
            env: variables to set on the ranks besides.

        Raises:
            RankFailedError: a rank raised or died; with its traceback.
            DistributedError: time ran out, with the stack of every rank that was still at work; or ``fn`` left
                something behind.
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
        """Return what every rank returned, pickled, and what each left behind."""
        work = _dump(fn, args)
        try:
            self._start()
            # Port 0: the operating system chooses a free one, and nobody can take it in between.
            hosts = process_group is None
            store = host("127.0.0.1", 0) if hosts else None
            self._send(work, process_group, timeout, {**os.environ, **(env or {})}, store)
            outcomes = self._collect(timeout)
            leftovers = self._ask_for_leftovers()
            del store
        except BaseException:
            self._kill()
            raise
        return outcomes, leftovers

    def close(self) -> None:
        """End the ranks.

        Raises:
            DistributedError: one did not end by itself, or not with exit code 0.
        """
        try:
            for worker in self._workers:
                worker.pipe.close()
            for worker in self._workers:
                worker.process.join(_EXIT_LIMIT)
                if worker.process.exitcode != 0:
                    raise _bad_end(worker)
        finally:
            self._kill()

    def _kill(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None

    def _start(self) -> None:
        if self._workers:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, "drivetrain.testing._rank_process", *self._preload])
        self._scratch = Scratch()
        for rank in range(self.nprocs):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, self.nprocs, theirs), name=f"rank-{rank}")
            self._workers.append(_Worker(rank, process, ours))
            process.start()
            theirs.close()
        for worker, message in self._answers(time.monotonic() + _START_LIMIT):
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
            own = {} if store is None else _rank_variables(worker.rank, self.nprocs, store.port)
            worker.stacks = Path(self._scratch.path) / f"stack-{self._calls}-{worker.rank}.txt"
            worker.send(
                Call(
                    work,
                    {**variables, **own},
                    os.getcwd(),
                    list(sys.path),
                    multiprocessing.get_start_method(allow_none=True),
                    process_group,
                    f"{self._scratch.path}/rendezvous-{self._calls}",
                    timeout,
                    str(worker.stacks),
                )
            )

    def _collect(self, timeout: float) -> list[bytes]:
        """Return what every rank returned, pickled."""
        until = time.monotonic() + timeout
        outcomes: dict[int, Any] = {}
        for worker, outcome in self._answers(until):
            outcomes[worker.rank] = outcome
            if isinstance(outcome, Failure):
                until = min(until, time.monotonic() + _GRACE)
                late = [one for one in self._workers if one.rank not in outcomes]
                further = [answer for _, answer in self._answers(until, late)]
                raise RankFailedError(first_cause(one for one in [outcome, *further] if isinstance(one, Failure)))
        late = [worker for worker in self._workers if worker.rank not in outcomes]
        if late:
            raise _too_late(late, self.nprocs, timeout)
        return [outcomes[rank] for rank in range(self.nprocs)]

    def _ask_for_leftovers(self) -> dict[int, Leftovers]:
        for worker in self._workers:
            worker.send(ALL_RETURNED)
        told = {worker.rank: answer for worker, answer in self._answers(time.monotonic() + _EXIT_LIMIT)}
        for worker in self._workers:
            answer = told.get(worker.rank)
            if not isinstance(answer, Leftovers):
                raise _bad_end(worker)
        return told

    def _check(self, leftovers: Mapping[int, Leftovers]) -> None:
        for rank, left in leftovers.items():
            if left.still_running:
                self._kill()
            found = left.put_back + left.still_running
            if found:
                raise DistributedError(
                    f"Rank {rank} returned, and left behind {'; '.join(found)}",
                    "the next function in the same process would meet it",
                    "put it back, or end it, before the function returns",
                )

    def _answers(self, until: float, of: Sequence[_Worker] | None = None) -> Iterator[tuple[_Worker, Any]]:
        """Yield one message of each rank as they come, a `Failure` for one that died, until the clock says so."""
        waiting: dict[Any, _Worker] = {worker.pipe: worker for worker in (self._workers if of is None else of)}
        while waiting:
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
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
    """Call ``fn(*args)`` on ``nprocs`` ranks started for it and return the list of what each returned, by rank.

    It is `World.run` of a world that ends with the call: the arguments and errors are the same, but that a function may
    leave behind what ends with its process. Use it for one that leaves its mark; a `World` for many that do not.

    Raises:
        DistributedError: besides, a process did not end, or not well, after its function had returned.
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
            "ranks are processes of their own and get the function and its arguments pickled",
            "use a function at the top level of a module, and arguments that can be pickled",
        ) from error


def _rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return torchrun_variables(Placement(rank, world_size, rank, world_size), "127.0.0.1", port)


@dataclass(slots=True)
class _Worker:
    """A rank, seen by the caller."""

    rank: int
    process: BaseProcess
    pipe: Connection
    stacks: Path = field(default_factory=Path)

    def send(self, message: object) -> None:
        """Send to a rank that may be gone: who waits for its answer is told so."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(message)

    def receive(self) -> Any:
        """Return what the rank sent, or the failure that it is gone."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return Failure.of_exit(self.rank, self.process.exitcode or 0, self._stacks_left())

    def where(self) -> str:
        """Return the stacks that a late rank has left, or ""."""
        return self._stacks_left() if self.stacks.is_file() else "(it never began)"

    def _stacks_left(self) -> str:
        return self.stacks.read_text().strip() if self.stacks.is_file() else ""

    def end(self) -> None:
        """Make sure that the process is gone."""
        self.pipe.close()
        if self.process.pid is not None:
            if self.process.is_alive():
                self.process.kill()
            self.process.join()


def _too_late(late: Sequence[_Worker], nprocs: int, timeout: float) -> DistributedError:
    until = time.monotonic() + _STACK_LIMIT
    while time.monotonic() < until and not all(worker.where() for worker in late):
        time.sleep(0.02)
    time.sleep(0.02)  # one that `faulthandler` writes comes in pieces
    stacks = [f"rank {worker.rank}:\n{worker.where() or '(it does not say)'}" for worker in late]
    return DistributedError(
        f"Rank {', '.join(str(worker.rank) for worker in late)} of {nprocs} did not return within {timeout:g} s",
        "where they were:\n" + "\n".join(stacks),
        "look for a collective that not every rank calls; raise `timeout` where the work takes that long",
    )


def _bad_end(worker: _Worker) -> DistributedError:
    code = worker.process.exitcode
    detail = f"did not end within {_EXIT_LIMIT:g} s" if code is None else f"ended with code {code}"
    return DistributedError(
        f"Rank {worker.rank} returned, and then its process {detail}",
        "something that the function started is still there: a thread, a process group, a child process",
        "stop it before the function returns",
    )
