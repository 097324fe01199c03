"""Runs a function on several ranks, each a process of its own, and returns what every rank returned."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError, DistributedError
from drivetrain.failure import Failure, RankFailedError, first_cause
from drivetrain.launchers.function_launcher import PRELOAD
from drivetrain.launchers.lifeline import die_with_parent
from drivetrain.launchers.variables import torchrun_variables
from drivetrain.testing.late import stacks_when_late

_START_LIMIT = 120.0  # seconds for the workers to come up; the first time torch has to be imported
_EXIT_LIMIT = 10.0  # seconds for a worker to end once all have returned
_STACK_LIMIT = 3.0  # seconds in which a worker that is late says where it is
_GRACE = 0.3  # seconds in which further ranks may report after the first failure, to tell the cause from its effects


def run_distributed(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    process_group: str | None = "gloo",
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``fn(*args)`` on ``nprocs`` ranks and return the list of what each rank returned, by rank.

    Workers come from a fork server that has imported torch already, compute on one thread each, see the caller's
    environment variables as they are now, and never outlive the call.

    Args:
        fn: a function at the top level of a module, so that workers can import it.
        nprocs: the number of ranks.
        args: pickled for every rank; so is what ``fn`` returns. Tensors are copied, not shared.
        process_group: the backend of a default process group that is made before ``fn`` and destroyed after it.
            None makes none: workers get the variables that torchrun sets instead, with the store hosted by the
            caller, and ``fn`` (or a `Fit` in it) makes its own.
        timeout: seconds for the whole call, counted once all workers have started.
        env: variables to set in the workers besides.

    Raises:
        RankFailedError: a rank raised or died; with its traceback.
        DistributedError: time ran out; with the stack of every rank that was still at work.
        ConfigurationError: ``fn`` or its arguments cannot be pickled.
    """
    try:
        work = pickle.dumps((fn, args))
    except Exception as error:
        raise ConfigurationError(
            f"run_distributed cannot send {fn!r} with its arguments to other processes: {error}",
            "workers are processes of their own and get the function and its arguments pickled",
            "use a function at the top level of a module, and arguments that can be pickled",
        ) from error
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as folder:
        variables = {**os.environ, **(env or {})}
        store = None
        if process_group is None:
            # Port 0: the operating system chooses a free one, and nobody can take it in between.
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        workers = []
        try:
            for rank in range(nprocs):
                ours, theirs = context.Pipe()
                job = _Job(
                    rank,
                    nprocs,
                    work,
                    _rank_variables(variables, rank, nprocs, store),
                    process_group,
                    timeout,
                    folder,
                    os.getpid(),
                    multiprocessing.get_start_method(allow_none=True),
                )
                process = context.Process(target=_work, args=(job, theirs), name=f"rank-{rank}")
                workers.append(_Worker(rank, process, ours))
                process.start()
                theirs.close()
            return _collect(workers, timeout, folder)
        finally:
            for worker in workers:
                worker.end()
            del store


def _rank_variables(shared: Mapping[str, str], rank: int, world_size: int, store: TCPStore | None) -> dict[str, str]:
    if store is None:
        return dict(shared)
    placement = Placement(rank, world_size, rank, world_size)
    return {**shared, **torchrun_variables(placement, "127.0.0.1", store.port)}


# The worker's side


@dataclass(frozen=True, slots=True)
class _Job:
    rank: int
    world_size: int
    work: bytes
    variables: dict[str, str]
    process_group: str | None
    timeout: float
    folder: str
    caller: int
    start_method: str | None


def _work(job: _Job, pipe: Connection) -> None:
    die_with_parent()
    # The fork server holds the environment of the moment it was started in; the caller's may have changed since.
    os.environ.clear()
    os.environ.update(job.variables)
    torch.set_num_threads(1)
    # Else the workers of a DataLoader would come from a fork server too, of their own, which imports torch anew.
    multiprocessing.set_start_method(job.start_method, force=True)
    pipe.send("started")
    with stacks_when_late(_stack_file(job.folder, job.rank), job.timeout):
        try:
            if job.process_group is not None:
                dist.init_process_group(
                    job.process_group,
                    init_method=f"file://{job.folder}/rendezvous",
                    rank=job.rank,
                    world_size=job.world_size,
                    # Later than the caller's, whose error tells where every rank is.
                    timeout=timedelta(seconds=job.timeout + 10),
                )
            fn, args = pickle.loads(job.work)
            # Pickled here, by value: what multiprocessing sends of a tensor is a handle that ends with the process.
            outcome: bytes | Failure = pickle.dumps(fn(*args))
        except BaseException as error:
            outcome = Failure.of_exception(job.rank, error)
        pipe.send(outcome)
        # A group that is destroyed here while another rank is in a collective would fail that rank.
        try:
            pipe.recv()
        except EOFError:
            return
        if job.process_group is not None and dist.is_initialized():
            dist.destroy_process_group()


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack-{rank}.txt"


# The caller's side


@dataclass(slots=True)
class _Worker:
    rank: int
    process: BaseProcess
    pipe: Connection
    started: bool = False
    outcome: bytes | Failure | None = field(default=None)

    def listen(self) -> None:
        """Take in what the worker sent, or that it is gone."""
        try:
            message = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            self.outcome = Failure.of_exit(self.rank, self.process.exitcode or 0)
            return
        if message == "started":
            self.started = True
        else:
            self.outcome = message

    def end(self) -> None:
        """Make sure that the process is gone."""
        self.pipe.close()
        if self.process.pid is not None:
            if self.process.is_alive():
                self.process.kill()
            self.process.join()


def _collect(workers: list[_Worker], timeout: float, folder: str) -> list[Any]:
    deadline = time.monotonic() + _START_LIMIT
    all_started = False
    while any(worker.outcome is None for worker in workers):
        _listen(workers, deadline)
        if not all_started and all(worker.started for worker in workers):
            all_started, deadline = True, time.monotonic() + timeout
        failures = [worker.outcome for worker in workers if isinstance(worker.outcome, Failure)]
        if failures:
            raise RankFailedError(_cause(workers))
        if time.monotonic() >= deadline:
            raise _too_late(workers, timeout, folder)
    if any(isinstance(worker.outcome, Failure) for worker in workers):
        raise RankFailedError(_cause(workers))
    for worker in workers:
        worker.pipe.send("all returned")
    results = []
    for worker in workers:
        worker.process.join(_EXIT_LIMIT)
        if worker.process.exitcode != 0:
            stuck = worker.process.exitcode is None
            detail = f"did not end within {_EXIT_LIMIT:g} s" if stuck else f"ended with code {worker.process.exitcode}"
            raise DistributedError(
                f"Rank {worker.rank} returned, and then its process {detail}",
                "something that the function started is still there: a thread, a process group, a child process",
                "stop it before the function returns",
            )
        assert isinstance(worker.outcome, bytes)
        results.append(pickle.loads(worker.outcome))
    return results


def _listen(workers: list[_Worker], deadline: float) -> None:
    waiting = {worker.pipe: worker for worker in workers if worker.outcome is None}
    for pipe in wait(list(waiting), max(0.0, deadline - time.monotonic())):
        waiting[pipe].listen()  # type: ignore[index]


def _cause(workers: list[_Worker]) -> Failure:
    until = time.monotonic() + _GRACE
    while time.monotonic() < until and any(worker.outcome is None for worker in workers):
        _listen(workers, until)
    return first_cause(worker.outcome for worker in workers if isinstance(worker.outcome, Failure))


def _too_late(workers: list[_Worker], timeout: float, folder: str) -> DistributedError:
    late = [worker.rank for worker in workers if worker.outcome is None]
    until = time.monotonic() + _STACK_LIMIT
    while time.monotonic() < until and not all(_stack(folder, rank) for rank in late):
        time.sleep(0.02)
    time.sleep(0.02)  # one that `faulthandler` writes comes in pieces
    stacks = [f"rank {rank}:\n{_stack(folder, rank) or '(it does not say)'}" for rank in late]
    return DistributedError(
        f"Rank {', '.join(map(str, late))} of {len(workers)} did not return within {timeout:g} s",
        "where they were:\n" + "\n".join(stacks),
        "look for a collective that not every rank calls; raise `timeout` where the work takes that long",
    )


def _stack(folder: str, rank: int) -> str:
    path = _stack_file(folder, rank)
    return path.read_text().strip() if path.exists() else "(it never started)"
