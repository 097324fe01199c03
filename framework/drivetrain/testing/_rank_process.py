"""The process of one rank of a `World`, which runs functions one after another and restores its state in between."""

from __future__ import annotations

import faulthandler
import gc
import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain._distributed.child_processes import ProcessSettings, outcome_of
from drivetrain._distributed.parent_watchdog import die_with_parent
from drivetrain._distributed.watchdog import dumped_stacks
from drivetrain._runtime.process_state import ProcessState
from drivetrain.testing._leak_checks import ProcessSnapshot

STARTED = "started"
ALL_RETURNED = "all returned"
_FALLBACK_DELAY = 2.0  # seconds that the timer's thread gets to dump the stacks


@dataclass(frozen=True, slots=True)
class Call:
    """A function call for a rank, with the caller's process state.

    Attributes:
        work: the pickled function and arguments.
        settings: the environment variables, the working directory and the start method of child processes.
        import_paths: ``sys.path``.
        process_group: the backend of the process group for the function, or None.
        rendezvous: the path of a file that does not exist yet, for the rendezvous of the process group.
        timeout: seconds until the rank dumps its stacks.
        stack_file: the file into which the rank dumps its stacks, after the timeout or a fault such as SIGSEGV.
    """

    work: bytes
    settings: ProcessSettings
    import_paths: list[str]
    process_group: str | None
    rendezvous: str
    timeout: float
    stack_file: str


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What a call left behind.

    Attributes:
        undone_changes: descriptions of changes that were undone.
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
                call.settings.apply()
                sys.path[:] = call.import_paths
                leftovers = _run_call(call, rank, world_size, pipe)
            torch.set_num_threads(1)
            pipe.send(leftovers)
        except (EOFError, BrokenPipeError):
            return


def _run_call(call: Call, rank: int, world_size: int, pipe: Connection) -> Leftovers:
    """Run the function, send its outcome, and wait until all ranks have returned.

    The process group is destroyed only after all ranks have returned. If a rank destroyed its group while another rank
    is in a collective, the collective of the other rank would fail.
    """
    snapshot = ProcessSnapshot()
    with _stacks_dumped_to(Path(call.stack_file), call.timeout):
        pipe.send(outcome_of(rank, partial(_result, call, rank, world_size)))
        pipe.recv()
        if call.process_group is not None and dist.is_initialized():
            dist.destroy_process_group()
    return Leftovers(snapshot.restore(), snapshot.still_running())


def _result(call: Call, rank: int, world_size: int) -> Any:
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
    return fn(*args)


@contextmanager
def _stacks_dumped_to(path: Path, seconds: float) -> Iterator[None]:
    """Write the stacks of all threads to ``path`` at a fault, and if the block is still running after ``seconds``.

    After ``seconds``, a Python thread that holds the GIL writes the stacks. `faulthandler.dump_traceback_later` reads
    stacks while they change, and this crashes about one busy process in ten. The function is therefore only the
    fallback for a thread that hangs while it holds the GIL.
    """
    with path.open("w") as file:

        def dump() -> None:
            faulthandler.cancel_dump_traceback_later()
            others = [stack for stack in dumped_stacks() if not stack.startswith("Current thread")]
            file.write("\n\n".join(others))
            file.flush()

        faulthandler.enable(file)
        faulthandler.dump_traceback_later(seconds + _FALLBACK_DELAY, file=file)
        timer = threading.Timer(seconds, dump)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()
