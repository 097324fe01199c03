"""Calls a function on every rank, in one new process per rank, and returns the values."""

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

from drivetrain._distributed.failure import Failure, RankFailedError, error_of_all, first_cause
from drivetrain._distributed.rendezvous import host, host_on, listen
from drivetrain._runtime.working_directory import working_directory
from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.launchers._fork_safety import why_not_fork
from drivetrain.launchers._parent_watchdog import die_with_caller, die_with_parent
from drivetrain.launchers._processes import ERROR_FILE_VARIABLE, Processes, polls
from drivetrain.launchers._signal_forwarding import SignalForwarding
from drivetrain.launchers._torchrun_variables import suggested_threads, torchrun_variables
from drivetrain.launchers.launched_processes import LaunchedProcesses, current_world, name_new_job, set_current_world
from drivetrain.launchers.launcher import Launcher, Work

StartMethod = Literal["spawn", "forkserver", "fork"]
Result = TypeVar("Result")

# If DDP imports torch._dynamo after `init_process_group`, the threads of the process group never end. The fork server
# therefore imports torch._dynamo before it starts ranks.
PRELOAD = (
    *("torch", "torch.distributed", "torch._dynamo"),
    *("drivetrain.launchers.function_launcher", "drivetrain.launchers._fork_server"),
)


class FunctionLauncher(Launcher):
    """Starts one process per rank, none of which is the caller, and waits until all have ended.

    Args:
        start_method: "fork" copies this process, so that functions and classes of a notebook work. "spawn" starts a new
            interpreter. "forkserver" forks a server that has imported torch.
        grace: seconds that the other ranks get to stop after the first failure.
    """

    kind = "function"

    def __init__(self, start_method: StartMethod = "spawn", *, grace: float = 5.0) -> None:
        self.start_method = start_method
        self._grace = grace

    def check(self, num_local: int) -> None:
        """Raise an error if the start method is "fork" and this process cannot be forked safely."""
        reason = why_not_fork() if self.start_method == "fork" else None
        if reason is not None:
            raise ConfigurationError(
                f'launcher="fork" cannot start {num_local} processes here',
                reason,
                'use launcher="forkserver" with your definitions in a module, or start the run earlier in the program',
            )

    def run(self, work: Work, placement: Placement, *, address: str = "127.0.0.1", port: int = 0) -> Any:
        """Run ``work`` in new processes."""

        def call(fn: Callable[..., Any], *args: Any) -> Any:
            return self.launch(placement, fn, *args, address=address, port=port, forward_signals=work.signals)

        return work.run_in_other_processes(call)

    def launch(  # type: ignore[override]  # the caller gets no handle
        self,
        placement: Placement,
        fn: Callable[..., Result],
        *args: Any,
        address: str = "127.0.0.1",
        port: int = 0,
        forward_signals: Sequence[int] = (),
    ) -> Result:
        """Call ``fn(*args)`` on every rank of this node and return the value from the first of these ranks.

        The processes get torchrun's variables, and the caller hosts their store. Arguments and return values are
        copied and share no memory between the processes.

        Args:
            placement: the placement of this node's first rank.
            fn: the function to call.
            args: the arguments of ``fn``. They are pickled with ``fn``, except with the start method "fork".
            address: the host of the first node.
            port: the port of the store on the first node; 0 lets the operating system choose.
            forward_signals: signals to forward from the caller to the ranks.

        Raises:
            ConfigurationError: ``fn`` or an argument cannot be pickled, or a launcher has started this process.
            RankFailedError: a rank raised or died. If all ranks raised the same error, that error is raised instead.
        """
        return self.launch_all(placement, fn, *args, address=address, port=port, forward_signals=forward_signals)[0]

    def launch_all(
        self,
        placement: Placement,
        fn: Callable[..., Result],
        *args: Any,
        address: str = "127.0.0.1",
        port: int = 0,
        forward_signals: Sequence[int] = (),
    ) -> list[Result]:
        """Call ``fn(*args)`` as `launch` does and return the values of all ranks of this node, by rank."""
        _check_nesting()
        work = _Call(fn, args) if self.start_method == "fork" else _dump(fn, args, self.start_method)
        hosts_store, forks = placement.rank == 0, self.start_method == "fork"
        job, nodes = name_new_job(placement), placement.num_nodes
        listener = listen(address, port, nodes) if hosts_store and forks else None
        store = host(address, port, num_nodes=nodes, job=job) if hosts_store and not forks else None
        if listener is not None:
            port = listener.getsockname()[1]
        elif store is not None:
            port = store.port
        setups = [
            _RankSetup(
                self.start_method,
                replace(placement, rank=placement.rank + local_rank, local_rank=local_rank),
                address,
                port,
                job,
                dict(os.environ),
                working_directory(),
                multiprocessing.get_start_method(allow_none=True),
                listener,
            )
            for local_rank in range(placement.local_world_size)
        ]
        if self.start_method == "forkserver":
            multiprocessing.set_forkserver_preload(list(PRELOAD))
        processes = Processes.of_function(placement.rank, _run, [(setup, work) for setup in setups], self.start_method)
        forwarding = SignalForwarding(processes, forward_signals)
        try:
            if listener is not None:
                # The store is created only after the fork. A thread of the store holds a lock while it resolves the
                # address of a peer, and in a process that is forked at that moment the lock would stay locked
                # forever. Ranks that connect earlier wait until the store exists.
                store = host_on(listener, address, job)
            processes.store = store
            with forwarding:
                values = self._wait(processes)
        except KeyboardInterrupt:
            # The terminal sends SIGINT to the ranks too.
            processes.wait(self._grace)
            raise
        except BaseException:
            number = forwarding.fatal_signal(processes.failures())
            if number is not None:
                signal.raise_signal(number)
            raise
        finally:
            processes.end(kill=True)
            del store
        return [pickle.loads(values[rank]) for rank in sorted(values)]

    def _wait(self, processes: Processes) -> dict[int, bytes]:
        for _ in polls(float("inf")):
            # Exit codes are read before values, because a process ends after it has sent its value.
            codes, values, failures = processes.exit_codes(), processes.values(), processes.failures()
            if not failures and all(code is None or rank in values for rank, code in codes.items()):
                if None not in codes.values():
                    return values
                continue
            if failures:
                processes.announce(first_cause(failures))
            # The other ranks stop by themselves, and report their own failures.
            processes.wait(self._grace)
            failures = processes.failures()
            known = {failure.rank for failure in failures} | values.keys()
            failures += [
                Failure(rank, 0, message="ended before its function had returned")
                for rank, code in processes.exit_codes().items()
                if code is not None and rank not in known
            ]
            raise self._error(failures, len(codes))
        raise AssertionError("unreachable: the polls never end")

    def _error(self, failures: Sequence[Failure], world_size: int) -> BaseException:
        cause = first_cause(failures)
        original = error_of_all(failures, world_size)
        if original is not None:
            # A cause would be printed with the error's text again, and below it the frames of this process.
            original.add_note(f"Traceback of rank {cause.rank}:\n{cause.frames()}")
            return original
        error = RankFailedError(cause)
        if cause.error_type is None and cause.exit_code == 1 and self.start_method != "fork":
            error.fix += (
                '; if the script has no `if __name__ == "__main__":`, put the work of the script under this line'
            )
        return error


# Code that runs in the started processes


@dataclass(frozen=True, slots=True)
class _Call:
    fn: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _RankSetup:
    start_method: StartMethod
    placement: Placement
    address: str
    port: int
    job: str
    variables: dict[str, str]
    folder: str | None
    child_start_method: str | None
    listener: socket.socket | None
    """The listening socket of the caller's store, if the caller forks."""


def _run(setup: _RankSetup, work: _Call | bytes) -> bytes:
    die_with_parent()
    if setup.start_method == "forkserver":
        die_with_caller()
    # OpenMP's threads do not survive a fork. A forked process that waited for these threads would block forever.
    forked = setup.start_method == "fork"
    torch.set_num_threads(1 if forked else suggested_threads(setup.placement.local_world_size))
    _restore_process_settings(setup)
    if setup.listener is not None:
        setup.listener.close()
    world = LaunchedProcesses("function", setup.placement, setup.address, setup.port, job=setup.job)
    set_current_world(world)
    try:
        call = _load(work) if isinstance(work, bytes) else work
        # The return value is pickled here, because multiprocessing would send a tensor as a handle, and the handle
        # becomes invalid when this process ends.
        return pickle.dumps(call.fn(*call.args))
    except BaseException as error:
        world.report(error)
        raise


def _restore_process_settings(setup: _RankSetup) -> None:
    """Restore the caller's environment variables, working directory and multiprocessing start method.

    The fork server has the variables and the directory of the moment when the server was started. Without the caller's
    start method, DataLoader workers would be started like this process, import torch again, and take seconds to start.
    """
    error_file = os.environ[ERROR_FILE_VARIABLE]
    os.environ.clear()
    os.environ.update(setup.variables)
    os.environ.update(torchrun_variables(setup.placement, setup.address, setup.port, setup.job))
    os.environ[ERROR_FILE_VARIABLE] = error_file
    if setup.folder is not None:
        os.chdir(setup.folder)
    multiprocessing.set_start_method(setup.child_start_method, force=True)
    # After a fork, torch creates its thread pool at first use, which is this call. Otherwise all of autograd's device
    # threads would create the pool at the same time, and one of them would abort with "Invalid thread pool!".
    torch.set_num_threads(torch.get_num_threads())


def _load(work: bytes) -> _Call:
    try:
        call = pickle.loads(work)
    except (AttributeError, ImportError) as error:
        raise ConfigurationError(
            f"the function or one of its arguments does not exist in the started process: {error}",
            "definitions in a notebook, a REPL or a module that cannot be imported exist only in the process "
            "that made them",
            'use launcher="fork", or move the definitions into a module and import it',
        ) from error
    assert isinstance(call, _Call)
    return call


# Code that runs in the caller


def _check_nesting() -> None:
    world = current_world()
    if world is not None:
        raise ConfigurationError(
            f"rank {world.placement.rank} of {world.placement.world_size} cannot start processes for further ranks",
            "a launcher started this process for one rank",
            f"use {world.placement.world_size} processes, or 1 process (every rank then runs separately)",
        )
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigurationError(
            "the script starts processes while it is being imported",
            "a started process imports the caller's script first, which would start processes again",
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
                ". Or create them in a function at the top level of the test module, and call it in each rank: "
                "drivetrain.testing.run_distributed(function, 2)"
            )
        raise ConfigurationError(
            f"launcher={method!r} cannot send {_describe_unpicklable(fn, args)} to other processes: {error}",
            "the function and its arguments are pickled to be sent",
            fix,
        ) from error


def _describe_unpicklable(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return a description of what cannot be pickled: the function, or the name and type of an argument."""
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
