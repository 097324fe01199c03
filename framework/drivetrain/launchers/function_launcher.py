"""Calls a function on every rank, in one new process per rank, and returns the values."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Literal

import torch

from drivetrain._distributed.child_processes import (
    FunctionProcesses,
    ProcessSettings,
    all_or_raise,
    outcome_of,
    suggested_threads,
)
from drivetrain._distributed.failure import Failure
from drivetrain._distributed.parent_watchdog import die_with_caller, die_with_parent
from drivetrain._distributed.rendezvous import host_on, listen, name_new_job
from drivetrain.environments import Placement, torchrun_variables
from drivetrain.errors import ConfigurationError
from drivetrain.launchers._fork_safety import why_not_fork
from drivetrain.launchers.launched_processes import (
    LaunchedProcesses,
    current_processes,
    publish_first_failure,
    set_current_processes,
)
from drivetrain.launchers.launcher import Launcher

StartMethod = Literal["spawn", "forkserver", "fork"]

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

    def call(
        self,
        placement: Placement,
        function: Callable[..., Any],
        *arguments: Any,
        device: str = "cpu",
        signals: Sequence[int] = (),
    ) -> Any:
        """Call ``function(*arguments)`` on every rank of this node and return the value from the first of these ranks.

        The processes get torchrun's variables, and the caller hosts their store. Arguments and return values are
        copied and share no memory between the processes.

        Args:
            placement: the placement of this node's first rank.
            function: the function to call.
            arguments: the arguments. They are pickled with ``function``, except with the start method "fork".
            device: unused; every device of this node can be used.
            signals: signals to forward from the caller to the ranks.

        Raises:
            ConfigurationError: ``function`` or an argument cannot be pickled, or a launcher has started this process.
            RankFailedError: a rank raised or died. If all ranks raised the same error, that error is raised instead.
        """
        return self.call_all(placement, function, *arguments, signals=signals)[0]

    def call_all(
        self, placement: Placement, function: Callable[..., Any], *arguments: Any, signals: Sequence[int] = ()
    ) -> list[Any]:
        """Call ``function(*arguments)`` as `call` does and return the values of all ranks of this node, by rank."""
        _check_nesting()
        forks = self.start_method == "fork"
        work = _Call(function, arguments) if forks else _dump(function, arguments, self.start_method)
        placement = replace(placement, job=placement.job or name_new_job(placement.num_nodes))
        listener = store = None
        if placement.rank == 0:
            listener = listen(placement.address, placement.port, placement.num_nodes)
            placement = replace(placement, port=listener.getsockname()[1])
        if self.start_method == "forkserver":
            multiprocessing.set_forkserver_preload(list(PRELOAD))
        settings, inherited = ProcessSettings.here(), listener if forks else None
        places = map(placement.neighbour, range(placement.local_world_size))
        setups = {place.rank: (_RankSetup(self.start_method, place, settings, inherited), work) for place in places}
        processes = FunctionProcesses(_run, setups, self.start_method)
        try:
            if listener is not None:
                # The store is created only after a fork. A thread of the store holds a lock while it resolves the
                # address of a peer, and in a process that is forked at that moment the lock would stay locked
                # forever. Ranks that connect earlier wait until the store exists.
                store = host_on(listener, placement.address, placement.job)
            with _forwarded(signals, processes) as forwarded:
                outcomes = processes.outcomes(
                    grace=self._grace, on_failure=lambda failure: publish_first_failure(store, failure)
                )
            for outcome in outcomes.values():
                code = outcome.exit_code if isinstance(outcome, Failure) else None
                if code is not None and -code in forwarded:
                    signal.raise_signal(-code)  # the rank did not handle it
            return [pickle.loads(value) for value in all_or_raise(outcomes, placement.local_world_size)]
        except KeyboardInterrupt:
            # The terminal sends SIGINT to the ranks too.
            processes.wait(self._grace)
            raise
        finally:
            processes.end(kill=True)
            # The frames of an error would keep the store. Python would crash if it collected it in a forked process.
            store = None


@contextmanager
def _forwarded(numbers: Sequence[int], processes: FunctionProcesses) -> Iterator[set[int]]:
    """Forward signals to the processes within the block, if this is the main thread. Yield those that came."""
    sent: set[int] = set()

    def forward(number: int, frame: FrameType | None) -> None:
        sent.add(number)
        processes.send(number)

    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, forward) for number in numbers if is_main}
    try:
        yield sent
    finally:
        for number, handler in previous.items():
            if handler is not None:
                signal.signal(number, handler)


# Code that runs in the started processes


@dataclass(frozen=True, slots=True)
class _Call:
    fn: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _RankSetup:
    start_method: StartMethod
    placement: Placement
    settings: ProcessSettings
    listener: socket.socket | None
    """The listening socket of the caller's store, if the caller forks."""


def _run(setup: _RankSetup, work: _Call | bytes, pipe: Connection) -> None:
    die_with_parent()
    if setup.start_method == "forkserver":
        die_with_caller()
    place = setup.placement
    # OpenMP's threads do not survive a fork. A forked process that waited for these threads would block forever.
    torch.set_num_threads(1 if setup.start_method == "fork" else suggested_threads(place.local_world_size))
    setup.settings.apply()
    os.environ.update(torchrun_variables(place))
    # After a fork, torch creates its thread pool at first use, which is this call. Otherwise all of autograd's device
    # threads would create the pool at the same time, and one of them would abort with "Invalid thread pool!".
    torch.set_num_threads(torch.get_num_threads())
    if setup.listener is not None:
        setup.listener.close()
    set_current_processes(LaunchedProcesses(place, "function"))
    outcome = outcome_of(place.rank, partial(_call, work))
    pipe.send(outcome)
    if isinstance(outcome, Failure):
        sys.exit(1)


def _call(work: _Call | bytes) -> Any:
    call = _load(work) if isinstance(work, bytes) else work
    return call.fn(*call.args)


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
    processes = current_processes()
    if processes is not None:
        rank, world_size = processes.placement.rank, processes.placement.world_size
        raise ConfigurationError(
            f"rank {rank} of {world_size} cannot start processes for further ranks",
            "a launcher started this process for one rank",
            f"use {world_size} processes, or 1 process (every rank then runs separately)",
        )


def _dump(fn: Callable[..., Any], args: tuple[Any, ...], method: StartMethod) -> bytes:
    try:
        return pickle.dumps(_Call(fn, args))
    except Exception as error:
        raise ConfigurationError(
            f"launcher={method!r} cannot send the function and its arguments to other processes: {error}",
            "the function and its arguments are pickled to be sent",
            "define functions and classes at the top level of a module, and leave out open files, locks and lambdas; "
            "or create them in a function at the top level of a module, and call it in each rank: "
            "drivetrain.testing.run_distributed(function, 2)",
        ) from error
