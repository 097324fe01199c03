"""The process of one rank of a `World`, which runs functions one after another and restores its state in between."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from drivetrain._distributed.failure import Failure
from drivetrain._runtime.process_state import ProcessState
from drivetrain.launchers._parent_watchdog import die_with_parent
from drivetrain.testing._leak_checks import ProcessSnapshot
from drivetrain.testing._stack_dump import dump_stacks_to

STARTED = "started"
ALL_RETURNED = "all returned"


@dataclass(frozen=True, slots=True)
class Call:
    """A function call for a rank, with the caller's process state.

    Attributes:
        work: the pickled function and arguments.
        variables: all environment variables.
        folder: the working directory.
        import_paths: ``sys.path``.
        start_method: the start method of child processes that the function starts; None for the platform's default.
        process_group: the backend of the process group for the function, or None.
        rendezvous: the path of a file that does not exist yet, for the rendezvous of the process group.
        timeout: seconds until the rank dumps its stacks.
        stack_file: the file into which the rank dumps its stacks, after the timeout or a fault such as SIGSEGV.
    """

    work: bytes
    variables: dict[str, str]
    folder: str
    import_paths: list[str]
    start_method: str | None
    process_group: str | None
    rendezvous: str
    timeout: float
    stack_file: str


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What a call left behind.

    Attributes:
        restored: descriptions of changes that were undone.
        still_running: descriptions of threads and child processes. If there are any, the caller ends all ranks.
    """

    undone_changes: list[str]
    still_running: list[str]


def serve(rank: int, world_size: int, pipe: Connection) -> None:
    """Run calls until the caller closes the pipe."""
    die_with_parent()
    torch.set_num_threads(1)
    gc.freeze()  # collections skip the imported objects, which are never garbage
    pipe.send(STARTED)
    while True:
        try:
            call: Call = pipe.recv()
            with ProcessState(generators=True):
                _apply_process_state(call)
                leftovers = _run_call(call, rank, world_size, pipe)
            torch.set_num_threads(1)
            pipe.send(leftovers)
        except (EOFError, BrokenPipeError):
            return


def _apply_process_state(call: Call) -> None:
    os.environ.clear()
    os.environ.update(call.variables)
    os.chdir(call.folder)
    sys.path[:] = call.import_paths
    # With another start method, DataLoader workers would come from a second fork server, which imports torch again.
    multiprocessing.set_start_method(call.start_method, force=True)


def _run_call(call: Call, rank: int, world_size: int, pipe: Connection) -> Leftovers:
    """Run the function, send its outcome, and wait until all ranks have returned.

    The process group is destroyed only after all ranks have returned. If a rank destroyed its group while another rank
    is in a collective, the collective of the other rank would fail.
    """
    snapshot = ProcessSnapshot()
    with dump_stacks_to(Path(call.stack_file), call.timeout):
        pipe.send(_outcome(call, rank, world_size))
        pipe.recv()
        if call.process_group is not None and dist.is_initialized():
            dist.destroy_process_group()
    return Leftovers(snapshot.restore(), snapshot.still_running())


def _outcome(call: Call, rank: int, world_size: int) -> bytes | Failure:
    try:
        if call.process_group is not None:
            dist.init_process_group(
                call.process_group,
                init_method=f"file://{call.rendezvous}",
                rank=rank,
                world_size=world_size,
                # This timeout is longer than the timeout of the caller, whose error shows the stacks of all ranks.
                timeout=timedelta(seconds=call.timeout + 10),
            )
        fn, args = pickle.loads(call.work)
        # The return value is pickled here, because multiprocessing would send a tensor as a handle, and the handle
        # becomes invalid when the process ends.
        return pickle.dumps(fn(*args))
    except BaseException as error:
        return Failure.of_exception(rank, error)
