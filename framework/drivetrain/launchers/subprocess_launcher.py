"""Runs the caller's script again for the other ranks. The caller is the first rank of its node."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from dataclasses import replace

from drivetrain._distributed.child_processes import ScriptProcesses, suggested_threads
from drivetrain._distributed.failure import Failure, first_cause
from drivetrain._distributed.rendezvous import host, name_new_job
from drivetrain.environments import Placement, torchrun_variables
from drivetrain.launchers._rerun_command import rerun_command
from drivetrain.launchers.launched_processes import (
    LAUNCHER_VARIABLE,
    PARENT_VARIABLE,
    LaunchedProcesses,
    current_processes,
    set_current_processes,
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

    def launch(self, placement: Placement) -> LaunchedProcesses:
        """Start the processes of this node, or return the processes that an earlier call started.

        Raises:
            ConfigurationError: the script cannot be run again, or the processes of an earlier call differ in number.
            RankFailedError: a process of an earlier call has failed.
        """
        processes = current_processes()
        if processes is not None:
            processes.check_usable(placement.world_size)
            return processes
        command, nodes = self.command(), placement.num_nodes
        placement = replace(placement, job=placement.job or name_new_job(nodes))
        store = None
        if placement.rank == 0:
            store = host(placement.address, placement.port, num_nodes=nodes, job=placement.job)
            placement = replace(placement, port=store.port)
        children = None
        if placement.local_world_size > 1:
            neighbours = map(placement.neighbour, range(1, placement.local_world_size))
            children = ScriptProcesses(command, {place.rank: _variables(place) for place in neighbours})
        processes = LaunchedProcesses(placement, "script", store=store, children=children)
        set_current_processes(processes)
        if children is not None:
            atexit.register(self._finish, processes, children)
        return processes

    def _finish(self, processes: LaunchedProcesses, children: ScriptProcesses) -> None:
        """Wait for the other ranks when the caller exits, and terminate late ranks. Exit with a failed rank's code."""
        if not processes.is_current_process:
            return
        error = getattr(sys, "last_value", None)
        grace = self._grace if error is None else self._grace_after_failure
        children.wait(grace)
        late = [rank for rank, code in children.exit_codes().items() if code is None]
        failures = [failure for failure in children.failures() if failure.exit_code != processes.signal_exit_code]
        children.end()
        if error is not None:
            return
        failures += [
            Failure(
                rank,
                message=f"did not end within {grace:g} s after rank {processes.placement.rank}, and was terminated",
            )
            for rank in late
        ]
        if failures:
            _exit_with(first_cause(failures))


def _variables(placement: Placement) -> dict[str, str]:
    variables = {
        **torchrun_variables(placement),
        LAUNCHER_VARIABLE: "script",
        PARENT_VARIABLE: str(os.getpid()),
    }
    if not os.environ.get("OMP_NUM_THREADS"):
        variables["OMP_NUM_THREADS"] = str(suggested_threads(placement.local_world_size))
    return variables


def _exit_with(failure: Failure) -> None:
    # Only `os._exit` changes the exit code while the interpreter exits. `os._exit` skips flushing, so the streams are
    # flushed here. `os._exit` also skips functions that were registered with atexit before the launch.
    print(failure.one_line_summary(), file=sys.stderr)  # the rank itself has printed its traceback
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failure.process_exit_code)
