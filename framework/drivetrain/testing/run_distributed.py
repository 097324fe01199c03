"""Runs functions on several ranks, one process each, and returns what every rank returned."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from drivetrain._distributed.child_processes import FunctionProcesses, ProcessSettings
from drivetrain._distributed.failure import Failure, RankFailedError, first_cause
from drivetrain._distributed.rendezvous import host
from drivetrain.environments import Placement, torchrun_variables
from drivetrain.errors import ConfigurationError, DistributedError
from drivetrain.launchers.function_launcher import PRELOAD
from drivetrain.testing._rank_process import ALL_RETURNED, Call, Leftovers, serve

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
        self._processes: FunctionProcesses | None = None
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
            processes, scratch = self._start()
            # With port 0 the operating system chooses a free port, which no other process can take in between.
            store = host("127.0.0.1", 0) if process_group is None else None
            self._calls += 1
            files = [Path(scratch, f"stack-{self._calls}-{rank}.txt") for rank in range(self.nprocs)]
            for rank, file in enumerate(files):
                placement = Placement.on_one_node(rank, self.nprocs)
                variables = {} if store is None else torchrun_variables(replace(placement, port=store.port))
                settings = ProcessSettings.here({**(env or {}), **variables})
                rendezvous = f"{scratch}/rendezvous-{self._calls}"
                call = Call(work, settings, list(sys.path), process_group, rendezvous, timeout, str(file))
                processes.write(rank, call)
            outcomes = processes.messages(timeout=timeout, grace=_GRACE)
            _raise_failure(outcomes, files)
            late = [rank for rank in range(self.nprocs) if rank not in outcomes]
            if late:
                raise _timeout_error({rank: files[rank] for rank in late}, self.nprocs, timeout)
            for rank in range(self.nprocs):
                processes.write(rank, ALL_RETURNED)
            leftovers = processes.messages(timeout=_EXIT_LIMIT, grace=_EXIT_LIMIT)
            for rank in range(self.nprocs):
                if not isinstance(leftovers.get(rank), Leftovers):
                    raise _exit_error(rank, processes)
            del store
        except BaseException:
            self._kill()
            raise
        return [outcomes[rank] for rank in range(self.nprocs)], leftovers

    def close(self) -> None:
        """End the ranks.

        Raises:
            DistributedError: a rank did not end by itself, or ended with an exit code other than 0.
        """
        try:
            if self._processes is not None:
                self._processes.hang_up()
                self._processes.wait(_EXIT_LIMIT)
                for rank, code in self._processes.exit_codes().items():
                    if code != 0:
                        raise _exit_error(rank, self._processes)
        finally:
            self._kill()

    def _kill(self) -> None:
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.end(kill=True)
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _start(self) -> tuple[FunctionProcesses, str]:
        """Return the processes and the folder for their files."""
        if self._processes is None or self._scratch is None:
            preload = [*PRELOAD, "drivetrain.testing._rank_process", *self._preload]
            multiprocessing.set_forkserver_preload(preload)
            self._scratch = TemporaryDirectory(prefix="drivetrain-", ignore_cleanup_errors=True)
            arguments = {rank: (rank, self.nprocs) for rank in range(self.nprocs)}
            self._processes = FunctionProcesses(serve, arguments, "forkserver")
            _raise_failure(self._processes.messages(timeout=_START_LIMIT, grace=_GRACE))
        return self._processes, self._scratch.name

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


def _raise_failure(outcomes: Mapping[int, Any], stack_files: Sequence[Path] = ()) -> None:
    failures = [outcome for outcome in outcomes.values() if isinstance(outcome, Failure)]
    if failures:
        cause = first_cause(failures)
        if cause.error_type is None and stack_files:
            cause = replace(cause, traceback=_read(stack_files[cause.rank]))
        raise RankFailedError(cause)


def _read(stack_file: Path) -> str:
    """Return the stacks that a rank has dumped, or "" if there are none yet."""
    return stack_file.read_text().strip() if stack_file.is_file() else ""


def _timeout_error(stack_files: Mapping[int, Path], nprocs: int, timeout: float) -> DistributedError:
    """Return the error for ranks that are late, with the stacks that they dump into their files."""
    deadline = time.monotonic() + _STACK_LIMIT
    while time.monotonic() < deadline and not all(_read(file) for file in stack_files.values() if file.is_file()):
        time.sleep(0.02)
    time.sleep(0.02)  # `faulthandler` writes a dump in several pieces
    stacks = {rank: _read(file) or "(no stacks)" for rank, file in stack_files.items() if file.is_file()}
    shown = [f"rank {rank}:\n{stacks.get(rank, '(the function did not start)')}" for rank in stack_files]
    return DistributedError(
        f"Rank {', '.join(map(str, stack_files))} of {nprocs} did not return within {timeout:g} s",
        "stacks:\n" + "\n".join(shown),
        "look for a collective that not every rank calls, or increase `timeout` if the function takes longer",
    )


def _exit_error(rank: int, processes: FunctionProcesses) -> DistributedError:
    code = processes.exit_codes()[rank]
    detail = f"did not end within {_EXIT_LIMIT:g} s" if code is None else f"ended with code {code}"
    return DistributedError(
        f"Rank {rank} returned, but its process {detail}",
        "something that the function started still exists: a thread, a process group or a child process",
        "stop all of these before the function returns",
    )
