"""Runs the caller's script again for the other ranks. The caller is the first rank of its node."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from dataclasses import replace

from drivetrain._distributed.failure import Failure, RankFailedError, first_cause
from drivetrain._distributed.rendezvous import host
from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.launchers._processes import Processes
from drivetrain.launchers._rerun_command import rerun_command
from drivetrain.launchers._torchrun_variables import thread_variables, torchrun_variables
from drivetrain.launchers.launched_processes import (
    LAUNCHER_VARIABLE,
    PARENT_VARIABLE,
    THREAD_VARIABLE,
    LaunchedProcesses,
    current_world,
    gone_error,
    name_new_job,
    set_current_world,
)
from drivetrain.launchers.launcher import Launcher


class SubprocessLauncher(Launcher):
    """Starts the caller's script again, with the same command line, once for each further rank of this node.

    After `launch` every rank continues with the script. The processes live until the script ends, and a later `launch`
    reuses these processes. Only the other ranks get torchrun's variables; the environment of the caller does not
    change.

    Args:
        grace: seconds that the other ranks get to finish after the caller's script has ended.
        grace_after_failure: seconds that the other ranks get to finish after the caller's script has ended with an
            exception.
    """

    kind = "subprocess"

    def __init__(self, *, grace: float = 30.0, grace_after_failure: float = 5.0) -> None:
        self._grace = grace
        self._grace_after_failure = grace_after_failure

    def command(self) -> list[str]:
        """Return the command line of the other ranks.

        Override this method to run the command through another program that execs it, such as ``nice``.

        Raises:
            ConfigurationError: there is no script, or the script cannot be run again.
        """
        return rerun_command()

    def launch(self, placement: Placement, *, address: str = "127.0.0.1", port: int = 0) -> LaunchedProcesses:
        """Start the processes of this node, or return the world of the processes that an earlier call started.

        Args:
            placement: the placement of the caller, which is the first rank of its node.
            address: the host of rank 0, which is needed for several nodes.
            port: the port of the store on rank 0's host. On one node, 0 lets the operating system choose.

        Raises:
            ConfigurationError: the script cannot be run again, or the processes of an earlier call differ in number.
            RankFailedError: a process of an earlier call has failed.
        """
        world = current_world()
        if world is not None:
            return _reuse_world(world, placement)
        if placement.local_rank != 0:
            raise ConfigurationError(
                f"local rank {placement.local_rank} cannot start the other processes of its node",
                "only the first process of a node starts the others",
                "pass the placement of the first process",
            )
        command = self.command()
        job = name_new_job(placement)
        store = host(address, port, num_nodes=placement.num_nodes, job=job) if placement.rank == 0 else None
        port = port if store is None else store.port
        processes = self._start(command, placement, address, port, job) if placement.local_world_size > 1 else None
        world = LaunchedProcesses(self.kind, placement, address, port, store=store, processes=processes, job=job)
        set_current_world(world)
        if processes is not None:
            atexit.register(self._finish, world, processes)
        return world

    def _start(self, command: list[str], placement: Placement, address: str, port: int, job: str) -> Processes:
        variables = [
            {
                **torchrun_variables(
                    replace(placement, rank=placement.rank + local_rank, local_rank=local_rank),
                    address,
                    port,
                    job,
                ),
                **thread_variables(placement.local_world_size, os.environ),
                LAUNCHER_VARIABLE: self.kind,
                PARENT_VARIABLE: str(os.getpid()),
                **({} if threading.current_thread() is threading.main_thread() else {THREAD_VARIABLE: "1"}),
            }
            for local_rank in range(1, placement.local_world_size)
        ]
        return Processes.of_script(placement.rank + 1, command, variables)

    def _finish(self, world: LaunchedProcesses, processes: Processes) -> None:
        """Wait for the other ranks when the caller exits, and terminate late ranks. Exit with a failed rank's code."""
        if not world.is_current_process:
            return
        error = getattr(sys, "last_value", None)
        grace = self._grace if error is None else self._grace_after_failure
        processes.wait(grace)
        late = [rank for rank, code in processes.exit_codes().items() if code is None]
        failures = [failure for failure in processes.failures() if failure.exit_code != world.signal_exit_code]
        processes.end()
        if error is not None:
            return
        failures += [
            Failure(
                rank, message=f"did not end within {grace:g} s after rank {world.placement.rank}, and was terminated"
            )
            for rank in late
        ]
        if failures:
            _exit_with(first_cause(failures))


def _reuse_world(world: LaunchedProcesses, placement: Placement) -> LaunchedProcesses:
    failures = world.failures()
    if failures:
        raise RankFailedError(first_cause(failures))
    gone = world.ended()
    if gone:
        raise gone_error(gone)
    if world.placement.world_size != placement.world_size:
        raise ConfigurationError(
            f"{placement.world_size} processes are requested, but this script runs in {world.placement.world_size}",
            "an earlier fit, validate, test or predict started the processes, which live until the script ends",
            f"use {world.placement.world_size} processes again, or 1 (every rank then runs separately)",
        )
    return world


def _exit_with(failure: Failure) -> None:
    # Only `os._exit` changes the exit code while the interpreter exits. `os._exit` skips flushing, so the streams are
    # flushed here. `os._exit` also skips functions that were registered with atexit before the launch.
    print(failure.one_line_summary(), file=sys.stderr)  # the rank itself has printed its traceback
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failure.process_exit_code)
