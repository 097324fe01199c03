"""Calls a function on every rank, each in a process started for it, and brings back what it returned."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch

from drivetrain._distributed.failure import Failure, RankFailedError, first_cause
from drivetrain._distributed.job_identity import Job
from drivetrain._distributed.rendezvous import host, host_on, listen
from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.launchers._elastic import Processes, polls
from drivetrain.launchers._fork_safety import why_not_fork
from drivetrain.launchers._parent_watchdog import die_with_parent
from drivetrain.launchers._signal_forwarding import PassingOn
from drivetrain.launchers._torchrun_variables import UNNAMED, suggested_threads, torchrun_variables
from drivetrain.launchers.launcher import Launcher, Work
from drivetrain.launchers.world import World, current_world, job_to_start, set_current_world

StartMethod = Literal["spawn", "forkserver", "fork"]
Result = TypeVar("Result")

# An import of torch._dynamo after `init_process_group`, which DDP does, would keep the group's threads alive.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "drivetrain.launchers.function_launcher")


class FunctionLauncher(Launcher):
    """Starts one process a rank, all of them besides the caller, and waits until they have ended.

    Args:
        start_method: "fork" copies this process as it is, so that functions and classes of a notebook work;
            "spawn" starts afresh; "forkserver" too, from a server that has imported torch once.
        grace: seconds that the other ranks get to come out after the first one failed.
    """

    kind = "function"

    def __init__(self, start_method: StartMethod = "spawn", *, grace: float = 5.0) -> None:
        self.start_method = start_method
        self._grace = grace

    def check(self, num_local: int) -> None:
        """Refuse to fork a process whose copy could not compute."""
        reason = why_not_fork() if self.start_method == "fork" else None
        if reason is not None:
            raise ConfigurationError(
                f'launcher="fork" cannot start {num_local} processes here',
                reason,
                'use launcher="forkserver", with what you defined moved into a module; or fork before that is used',
            )

    def run(self, work: Work, placement: Placement, *, address: str = "127.0.0.1", port: int = 0) -> Any:
        """Do ``work`` in processes that are started for it."""

        def call(fn: Callable[..., Any], *args: Any) -> Any:
            return self.launch(placement, fn, *args, address=address, port=port, pass_on=work.signals)

        return work.elsewhere(call)

    def launch(  # type: ignore[override]  # no World of the caller's comes of it
        self,
        placement: Placement,
        fn: Callable[..., Result],
        *args: Any,
        address: str = "127.0.0.1",
        port: int = 0,
        pass_on: Sequence[int] = (),
    ) -> Result:
        """Call ``fn(*args)`` on every rank of this node and return what its first rank returned.

        The processes have torchrun's variables, and the caller hosts their store. What is sent and returned is copied:
        no memory is shared with the caller, whose tensors stay as they are.

        Args:
            placement: the first rank's of this node.
            fn: what to call.
            args: its arguments. Unless forked, they are pickled with ``fn``.
            address: the host of the first node.
            port: where the first node hosts the store; 0 lets the operating system choose.
            pass_on: signals that are for the ranks where the caller gets them.

        Raises:
            ConfigurationError: ``fn`` or an argument cannot be pickled, or this is itself a process that we started.
            RankFailedError: a rank raised or died. Where all raised the same error, it is raised as it is.
        """
        return self.launch_all(placement, fn, *args, address=address, port=port, pass_on=pass_on)[0]

    def launch_all(
        self,
        placement: Placement,
        fn: Callable[..., Result],
        *args: Any,
        address: str = "127.0.0.1",
        port: int = 0,
        pass_on: Sequence[int] = (),
    ) -> list[Result]:
        """Do as `launch`, and return what every rank of this node returned, by rank."""
        _check_nesting()
        work = _Call(fn, args) if self.start_method == "fork" else _dump(fn, args, self.start_method)
        hosts, forks = placement.rank == 0, self.start_method == "fork"
        job, nodes = job_to_start(placement), placement.num_nodes
        listener = listen(address, port, nodes) if hosts and forks else None
        store = host(address, port, num_nodes=nodes, job=job) if hosts and not forks else None
        if listener is not None:
            port = listener.getsockname()[1]
        elif store is not None:
            port = store.port
        jobs = [
            _Job(
                self.start_method,
                replace(placement, rank=placement.rank + local_rank, local_rank=local_rank),
                address,
                port,
                job,
                dict(os.environ),
                os.getcwd(),
                multiprocessing.get_start_method(allow_none=True),
                listener,
            )
            for local_rank in range(placement.local_world_size)
        ]
        if self.start_method == "forkserver":
            multiprocessing.set_forkserver_preload(list(PRELOAD))
        processes = Processes.of_function(placement.rank, _run, [(job, work) for job in jobs], self.start_method)
        passing = PassingOn(processes, pass_on)
        try:
            if listener is not None:
                # Not before: a thread of the store's that resolves a peer's address holds a lock, and a process that is
                # forked meanwhile would find it locked for ever. Who connects early waits.
                store = host_on(listener, address, job)
            processes.store = store
            with passing:
                values = self._wait(processes)
        except KeyboardInterrupt:
            # The terminal has told the others too.
            processes.wait(self._grace)
            raise
        except BaseException:
            number = passing.died_of(processes.failures())
            if number is not None:
                signal.raise_signal(number)
            raise
        finally:
            processes.end(kill=True)
            del store
        return [pickle.loads(values[rank]) for rank in sorted(values)]

    def _wait(self, processes: Processes) -> dict[int, bytes]:
        for _ in polls(float("inf")):
            # Looked at before elastic is asked, which kills the others as soon as one has ended without a value: they
            # are to come out by themselves, and to leave what they know.
            codes = processes.exit_codes()
            failures = processes.failures()
            if not failures and not any(code is not None for code in codes.values()):
                values = processes.values()
                if values is not None:
                    return values
                continue
            if failures:
                processes.announce(first_cause(failures))
            processes.wait(self._grace)
            failures = processes.failures()
            ended = [rank for rank, code in processes.exit_codes().items() if code is not None]
            known = {failure.rank for failure in failures}
            failures += [
                Failure(rank, 0, message="ended before its function had returned")
                for rank in ended
                if rank not in known
            ]
            raise self._error(failures, len(codes))
        raise AssertionError("unreachable: the polls go on for ever")

    def _error(self, failures: Sequence[Failure], world_size: int) -> BaseException:
        cause = first_cause(failures)
        error = RankFailedError(cause)
        same = {(failure.error_type, failure.message) for failure in failures}
        if len(failures) == world_size and len(same) == 1 and cause.pickled_error is not None:
            original = cause.load_error()
            if original is not None:
                original.__cause__ = error
                return original
        if cause.error_type is None and cause.exit_code == 1 and self.start_method != "fork":
            error.fix += '; where the script has no `if __name__ == "__main__":`, put its work under one'
        return error


# The started process's side


@dataclass(frozen=True, slots=True)
class _Call:
    fn: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    start_method: StartMethod
    placement: Placement
    address: str
    port: int
    job: Job
    variables: dict[str, str]
    folder: str
    workers_method: str | None
    listener: socket.socket | None
    """Where the caller's store will listen, if it forks."""


def _run(job: _Job, work: _Call | bytes) -> bytes:
    die_with_parent()
    # Threads of OpenMP do not survive a fork, and waiting for them would never end.
    forked = job.start_method == "fork"
    torch.set_num_threads(1 if forked else suggested_threads(job.placement.local_world_size))
    _restore_surroundings(job)
    if job.listener is not None:
        job.listener.close()
    world = World("function", job.placement, job.address, job.port, job=job.job)
    set_current_world(world)
    try:
        call = _load(work) if isinstance(work, bytes) else work
        # By value: what multiprocessing would send of a tensor is a handle that ends with this process.
        return pickle.dumps(call.fn(*call.args))
    except BaseException as error:
        world.report(error)
        raise


def _restore_surroundings(job: _Job) -> None:
    """Take on the caller's variables and folder: the fork server's are of the moment when it was started.

    And the way that its processes start theirs, a DataLoader's workers: each would import torch anew, for seconds.
    """
    error_file = os.environ["TORCHELASTIC_ERROR_FILE"]
    os.environ.clear()
    os.environ.update(job.variables)
    os.environ.update(torchrun_variables(job.placement, job.address, job.port, job.job.name or UNNAMED))
    os.environ["TORCHELASTIC_ERROR_FILE"] = error_file
    os.chdir(job.folder)
    multiprocessing.set_start_method(job.workers_method, force=True)
    # After a fork torch makes its pool of threads anew where one is asked for. Autograd's threads, one for each device,
    # would ask all at once, and one of them aborts: "Invalid thread pool!"
    torch.set_num_threads(torch.get_num_threads())


def _load(work: bytes) -> _Call:
    try:
        call = pickle.loads(work)
    except (AttributeError, ImportError) as error:
        raise ConfigurationError(
            f"the function or one of its arguments does not exist in the process started for it: {error}",
            "what was typed into a notebook or a REPL, or stands in a module that cannot be imported, exists in the "
            "process alone that defined it",
            'use launcher="fork", or move the definitions into a module and import it',
        ) from error
    assert isinstance(call, _Call)
    return call


# The caller's side


def _check_nesting() -> None:
    world = current_world()
    if world is not None:
        raise ConfigurationError(
            f"rank {world.placement.rank} of {world.placement.world_size} cannot start processes for further ranks",
            "it was itself started for one",
            "ask for as many processes as there are, or for 1 (every rank then runs by itself)",
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigurationError(
            "processes are started while this one is still importing the script",
            "a started process imports the caller's script first, and this script starts processes as it is imported",
            'put the work of the script under `if __name__ == "__main__":`',
        )


def _dump(fn: Callable[..., Any], args: tuple[Any, ...], method: StartMethod) -> bytes:
    try:
        return pickle.dumps(_Call(fn, args))
    except Exception as error:
        from drivetrain.launchers._script_runners import runner

        fix = "define functions and classes at the top level of a module; leave out open files, locks and lambdas"
        if runner() is not None:
            fix += (
                ". Or build all of it in a function at the top level of the test's module, and call that on the ranks: "
                "drivetrain.testing.run_distributed(function, 2)"
            )
        raise ConfigurationError(
            f"launcher={method!r} cannot send {_culprit(fn, args)} to other processes: {error}",
            "started processes get the function and its arguments pickled",
            fix,
        ) from error


def _culprit(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Name what cannot be pickled: the function, or the first such argument, by its parameter's name."""
    if not _can_dump(fn):
        return f"the function {getattr(fn, '__qualname__', fn)!r}"
    try:
        names = list(inspect.signature(fn).bind(*args).arguments)
    except (TypeError, ValueError):
        names = []
    for index, value in enumerate(args):
        if not _can_dump(value):
            name = names[index] if index < len(names) else str(index)
            return f"the argument {name!r} (a {type(value).__qualname__})"
    return "the arguments"


def _can_dump(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
