"""LaunchedProcesses: the processes of a run, as seen from one of these processes."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Literal

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from drivetrain._distributed.child_processes import ERROR_FILE_VARIABLE, ScriptProcesses
from drivetrain._distributed.failure import Failure, RankFailedError, failure_file, first_cause
from drivetrain._distributed.parent_watchdog import die_with_parent
from drivetrain._distributed.rendezvous import connect
from drivetrain._utilities_rank import set_utilities_rank
from drivetrain.environments import Placement, TorchrunEnvironment
from drivetrain.errors import ConfigurationError, DistributedError, DrivetrainError

# Environment variables of a process that runs the caller's script again. The children of that process inherit the
# variables too, but the process id of their parent differs from the value of `PARENT_VARIABLE`.
LAUNCHER_VARIABLE = "_DRIVETRAIN_LAUNCHER"
PARENT_VARIABLE = "_DRIVETRAIN_PARENT"

_FIRST_FAILURE = "first"  # the key, with the prefix "left", under which a caller that is not a rank publishes a failure
_MEET_PAUSE = 0.02  # seconds between two checks of whether all ranks have arrived
_CONNECT_LIMIT = timedelta(seconds=300)
_CONNECT_LIMIT_ONE_NODE = timedelta(seconds=5)  # torch tries to connect twice, so the limit is 10 seconds in effect


class LaunchedProcesses:
    """The processes of a run, as seen from one of them.

    Attributes:
        placement: this process's placement.
        kind: "script" if a launcher has all processes run the caller's script and the caller is one of the ranks;
            "function" if the processes run a function for a caller that is not a rank; None if no launcher of ours
            has started them: torchrun, a cluster or the user has, or this process is the only one.
    """

    def __init__(
        self,
        placement: Placement,
        kind: Literal["script", "function"] | None = None,
        *,
        store: Store | None = None,
        children: ScriptProcesses | None = None,
    ) -> None:
        self.placement = placement
        self.kind = kind
        self._store = store
        self._children = children
        self._connection_error: DrivetrainError | None = None
        self._pid = os.getpid()
        self._meetings = 0
        self.signal_exit_code: int | None = None
        """The exit code of ranks that stopped because of a signal, which is not a failure."""

    @property
    def is_caller(self) -> bool:
        """Whether this process started the other processes of its node."""
        return self._children is not None

    @property
    def is_current_process(self) -> bool:
        """Whether this is the process that created the object, and not a fork of it."""
        return self._pid == os.getpid()

    def store(self, prefix: str) -> Store:
        """Return the key-value store that all processes share, with ``prefix`` prepended to its keys.

        Raises:
            DistributedError: there is no store at the address of `placement`.
            ConfigurationError: the store at this address belongs to another job.
        """
        if self._connection_error is not None:
            raise self._connection_error  # a failing run calls this method again to read the reports of other ranks
        if self._store is None:
            place = self.placement
            # On one machine, the store exists before this process starts, or as soon as all processes are forked.
            limit = _CONNECT_LIMIT if place.num_nodes > 1 else _CONNECT_LIMIT_ONE_NODE
            try:
                self._store = connect(place.address, place.port, place.job, place.rank, limit)
            except DrivetrainError as error:
                self._connection_error = error
                raise
        return PrefixStore(prefix, self._store)

    def check_usable(self, world_size: int | None) -> None:
        """Check that a further run can use the processes.

        Args:
            world_size: the requested number of processes; None for any.

        Raises:
            RankFailedError: a process that this process started has failed.
            DistributedError: a process that this process started has left the script.
            ConfigurationError: the number of processes differs.
        """
        failures, gone, size = self.failures(), self.ended(), self.placement.world_size
        if failures:
            raise RankFailedError(first_cause(failures))
        if gone:
            raise _gone_error(gone)
        if world_size not in (None, size):
            raise ConfigurationError(
                f"{world_size} processes are asked for, and this script runs in {size}.",
                "its processes were started by an earlier run and last until the script ends.",
                f"use {size} again, or 1 (every process then runs on its own).",
            )

    def wait_for_all(self) -> None:
        """Wait until all ranks that a launcher has started reach their next run, and check that no rank has ended.

        Raises:
            RankFailedError: a process that this process started has failed.
            DistributedError: a process that this process started has left the script.
        """
        if self.kind is None:
            return
        store = self.store("meetings")
        self._meetings += 1
        arrived = store.add("come", 1)
        while arrived < self._meetings * self.placement.world_size:
            failures = self.failures()
            if failures:
                raise RankFailedError(first_cause(failures))
            gone = self.ended()
            arrived = store.add("come", 0)
            if gone and arrived < self._meetings * self.placement.world_size:
                raise _gone_error(gone)
            time.sleep(_MEET_PAUSE)

    def failures(self) -> list[Failure]:
        """Return the failures of the processes that this process started.

        A process that runs a function returns the first failure that its caller has published. The method is cheap
        enough to be polled while waiting.
        """
        if self._children is not None:
            return self._children.failures()
        with contextlib.suppress(RuntimeError, DrivetrainError):
            if self.kind == "function" and self.store("left").check([_FIRST_FAILURE]):
                return [Failure.decode(self.store("left").get(_FIRST_FAILURE))]
        return []

    def ended(self) -> dict[int, int]:
        """Return the exit codes, by rank, of the ended processes that this process started."""
        codes = {} if self._children is None else self._children.exit_codes()
        return {rank: code for rank, code in codes.items() if code is not None}


def publish_first_failure(store: Store | None, failure: Failure) -> None:
    """Publish a failure to ranks that run a function, for `LaunchedProcesses.failures`, as a killed rank cannot.

    Args:
        store: the ranks' store, if this process hosts it.
        failure: the failure.
    """
    if store is not None:
        PrefixStore("left", store).set(_FIRST_FAILURE, failure.encode())


def _gone_error(ranks: Iterable[int]) -> DistributedError:
    """Return the error for ranks whose processes have ended while this rank makes a further call."""
    return DistributedError(
        f"rank {', '.join(map(str, sorted(ranks)))} has already left the script, which this rank is still running",
        "every rank has to make the same calls in the same order",
        "look for an early `sys.exit()`, or an `if` that depends on the rank near the end of the script",
    )


_current: LaunchedProcesses | None = None


def current_processes() -> LaunchedProcesses | None:
    """Return the processes that this process belongs to, or None if no launcher has started this process.

    In a process that runs the caller's script again, the first call connects the process to the caller. From then on
    the process ends when the caller ends, and reports its errors to the caller.

    Raises:
        DistributedError: the process that started this process has ended.
    """
    if _current is not None and _current.is_current_process:
        return _current
    return _join() if os.environ.get(LAUNCHER_VARIABLE) == "script" else None


def set_current_processes(processes: LaunchedProcesses | None) -> None:
    """Set the processes that this process belongs to."""
    global _current
    _current = processes
    if processes is not None:
        set_utilities_rank(processes.placement.rank)


def _join() -> LaunchedProcesses | None:
    parent = int(os.environ.get(PARENT_VARIABLE, "0"))
    if os.getppid() != parent:
        try:
            os.kill(parent, 0)
        except ProcessLookupError as error:
            raise DistributedError(
                f"the process that started rank {os.environ.get('RANK')} has ended",
                f"process {parent} hosts the store where all ranks meet",
                "read the last output of that process, then run the script again",
            ) from error
        return None  # a rank started this process, which is not part of the run
    environment = TorchrunEnvironment()
    processes = LaunchedProcesses(environment.with_address(environment.placement()), "script")
    set_current_processes(processes)
    die_with_parent(parent)
    atexit.register(_report_uncaught, processes)
    return processes


def _report_uncaught(processes: LaunchedProcesses) -> None:
    # The interpreter stores an uncaught exception in `sys.last_value`. Reading this attribute is simpler than replacing
    # `sys.excepthook`.
    error = getattr(sys, "last_value", None)
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if path and isinstance(error, BaseException) and processes.is_current_process:
        with contextlib.suppress(OSError):  # the disk is full, or the caller has ended and has removed the folder
            Failure.of_exception(processes.placement.rank, error).write(failure_file(path))
