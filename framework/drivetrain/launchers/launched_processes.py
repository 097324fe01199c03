"""LaunchedProcesses: the processes that a launcher started, as seen from one of these processes."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterable
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from drivetrain._distributed.failure import Failure, RankFailedError, failure_file, first_cause
from drivetrain._distributed.rendezvous import NO_NAME, admit
from drivetrain.environments import Placement, PlainEnvironment, TorchrunEnvironment
from drivetrain.environments._utilities_rank import set_utilities_rank
from drivetrain.errors import ConfigurationError, DistributedError
from drivetrain.launchers._parent_watchdog import die_with_parent
from drivetrain.launchers._processes import ERROR_FILE_VARIABLE, FAILURES_PREFIX, Processes

# Environment variables of a process that runs the caller's script again. The children of that process inherit the
# variables too, but the process id of their parent differs from the value of `PARENT_VARIABLE`.
LAUNCHER_VARIABLE = "_DRIVETRAIN_LAUNCHER"
PARENT_VARIABLE = "_DRIVETRAIN_PARENT"
THREAD_VARIABLE = "_DRIVETRAIN_FROM_THREAD"

_MEET_PAUSE = 0.02  # seconds between two checks of whether all ranks have arrived
_CONNECT_LIMIT = timedelta(seconds=300)
_CONNECT_LIMIT_ONE_NODE = timedelta(seconds=5)  # torch tries to connect twice, so the limit is 10 seconds in effect


class LaunchedProcesses:
    """The processes that a launcher started, as seen from one of these processes.

    Attributes:
        kind: "subprocess" if all processes run the caller's script and the caller is one of the ranks; "function" if
            the processes run a function for a caller that is not a rank.
        placement: this process's placement.
        address: the host of the store.
        port: the port of the store.
    """

    def __init__(
        self,
        kind: str,
        placement: Placement,
        address: str,
        port: int,
        *,
        store: Store | None = None,
        processes: Processes | None = None,
        job: str | None = None,
    ) -> None:
        self.kind = kind
        self.placement = placement
        self.address = address
        self.port = port
        self._store = store
        self._processes = processes
        self._job = job  # None if the store does not hold the name of its job
        self._connection_error: RuntimeError | ConfigurationError | None = None
        self._pid = os.getpid()
        self._meetings = 0
        self.signal_exit_code: int | None = None
        """The exit code of ranks that stopped because of a signal, which is not a failure."""

    @property
    def is_caller(self) -> bool:
        """Whether this process started the other processes of its node."""
        return self._processes is not None

    @property
    def has_external_store(self) -> bool:
        """Whether the store is hosted by a caller that is not a rank and outlives the ranks."""
        return self.kind == "function"

    def store(self, prefix: str) -> Store:
        """Return the key-value store that all processes share, with ``prefix`` prepended to its keys.

        The caller on the first node hosts the store, which exists as long as this caller.

        Raises:
            ConfigurationError: the store at this address belongs to another job.
        """
        if self._connection_error is not None:
            raise self._connection_error  # a failing run calls this method again to read the reports of other ranks
        if self._store is None:
            # On one machine, the store exists before this process starts, or as soon as all processes are forked.
            limit = _CONNECT_LIMIT if self.placement.num_nodes > 1 else _CONNECT_LIMIT_ONE_NODE
            try:
                store = TCPStore(self.address, self.port, is_master=False, timeout=limit)
                if self._job is not None:
                    admit(store, self._job, self.placement.rank, self.address, self.port)
            except (RuntimeError, ConfigurationError) as error:
                self._connection_error = error
                raise
            store.set_timeout(_CONNECT_LIMIT)
            self._store = store
        return PrefixStore(prefix, self._store)

    def wait_for_all(self) -> None:
        """Wait until all ranks have reached their next run, and check meanwhile that no rank has ended.

        Raises:
            RankFailedError: a process that this process started has failed.
            DistributedError: a process that this process started has left the script.
        """
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
                raise gone_error(gone)
            time.sleep(_MEET_PAUSE)

    def failures(self) -> list[Failure]:
        """Return the failures of the processes that this process started.

        A process that started no other processes returns the first failure that its launcher published. The method is
        cheap enough to be polled while waiting.
        """
        if self._processes is not None:
            return self._processes.failures()
        with contextlib.suppress(RuntimeError, ConfigurationError):
            if self.has_external_store and self.store(FAILURES_PREFIX).check(["first"]):
                return [Failure.decode(self.store(FAILURES_PREFIX).get("first"))]
        return []

    def ended(self) -> dict[int, int]:
        """Return the exit codes, by rank, of the ended processes that this process started."""
        codes = {} if self._processes is None else self._processes.exit_codes()
        return {rank: code for rank, code in codes.items() if code is not None}

    def kill(self) -> None:
        """Kill the processes that this process started."""
        if self._processes is not None:
            self._processes.end(kill=True)

    def report(self, error: BaseException) -> None:
        """Report an error of this process to the process that started it, where `failures` returns the report."""
        path = os.environ.get(ERROR_FILE_VARIABLE)
        if path and not self.is_caller:
            failure = Failure.of_exception(self.placement.rank, error)
            try:
                failure.write(failure_file(path))
            except OSError:
                # The disk is full, or the caller has ended and has removed the folder of the error files.
                with contextlib.suppress(RuntimeError, ConfigurationError):
                    self.store(FAILURES_PREFIX).set(str(failure.rank), failure.encode())

    @property
    def is_current_process(self) -> bool:
        """Whether this is the process that created the object, and not a fork of it."""
        return self._pid == os.getpid()


def gone_error(ranks: Iterable[int]) -> DistributedError:
    """Return the error for ranks whose processes have ended while this rank makes a further call."""
    return DistributedError(
        f"rank {', '.join(map(str, sorted(ranks)))} has already left the script, which this rank is still running",
        "every rank has to make the same calls in the same order",
        "look for an early `sys.exit()`, or an `if` that depends on the rank near the end of the script",
    )


def name_new_job(placement: Placement) -> str:
    """Return the name of the job whose processes this process is about to start.

    On one node the name is new. On several nodes it is the name that the user has given the job, or `NO_NAME`, because
    each node starts processes before the nodes can agree on a name.
    """
    if placement.num_nodes == 1:
        return os.urandom(8).hex()
    return PlainEnvironment().job or NO_NAME


_world: LaunchedProcesses | None = None


def current_world() -> LaunchedProcesses | None:
    """Return the world that this process belongs to, or None if no launcher has started this process.

    In a process that runs the caller's script again, the first call connects the process to the caller. From then on
    the process ends when the caller ends, and reports its errors to the caller.

    Raises:
        DistributedError: the process that started this process has ended.
    """
    if _world is not None and _world.is_current_process:
        return _world
    return _join() if os.environ.get(LAUNCHER_VARIABLE) == "subprocess" else None


def set_current_world(world: LaunchedProcesses | None) -> None:
    """Set the world of this process."""
    global _world
    _world = world
    if world is not None:
        set_utilities_rank(world.placement.rank)


def _join() -> LaunchedProcesses | None:
    parent = int(os.environ.get(PARENT_VARIABLE, "0"))
    if os.getppid() != parent:
        if _is_alive(parent):
            return None  # a rank started this process, which is not part of the run
        raise DistributedError(
            f"the process that started rank {os.environ.get('RANK')} has ended",
            f"process {parent} hosts the store where all ranks meet",
            "read the last output of that process, then run the script again",
        )
    environment = TorchrunEnvironment()
    world = LaunchedProcesses(
        "subprocess",
        environment.placement(),
        environment.main_address,
        environment.main_port,
        job=environment.job or NO_NAME,
    )
    set_current_world(world)
    die_with_parent(parent, from_thread=THREAD_VARIABLE in os.environ)
    atexit.register(_report_uncaught, world)
    return world


def _report_uncaught(world: LaunchedProcesses) -> None:
    # The interpreter stores an uncaught exception in `sys.last_value`. Reading this attribute is simpler than replacing
    # `sys.excepthook`.
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException) and world.is_current_process:
        world.report(error)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0
