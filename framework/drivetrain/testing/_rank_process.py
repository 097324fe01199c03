"""A rank of a `World`: a process that calls one function after the other, each as if it were the first."""

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
from drivetrain.testing._leak_checks import Surroundings
from drivetrain.testing._stack_dump import stacks_left_in

STARTED = "started"
ALL_RETURNED = "all returned"


@dataclass(frozen=True, slots=True)
class Call:
    """What a rank is asked to do, and the surroundings in which the caller would do it.

    Attributes:
        work: the function and its arguments, pickled.
        variables: all of the environment.
        folder: the working directory.
        modules: where modules are imported from (``sys.path``).
        start_method: how the function's own child processes are started; None for the platform's default.
        process_group: the backend of the group that is made for the function, or None.
        rendezvous: a file that does not exist yet, where the ranks of that group meet.
        timeout: seconds until the rank says where it is.
        stacks: the file in which it does so, and where a fault such as SIGSEGV leaves the stacks, too.
    """

    work: bytes
    variables: dict[str, str]
    folder: str
    modules: list[str]
    start_method: str | None
    process_group: str | None
    rendezvous: str
    timeout: float
    stacks: str


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What a call left behind: what was put back since, and what cannot be, which ends the world."""

    put_back: list[str]
    still_running: list[str]


def serve(rank: int, world_size: int, pipe: Connection) -> None:
    """Answer calls until the caller closes the pipe."""
    die_with_parent()
    torch.set_num_threads(1)
    gc.freeze()  # None of what is imported by now is garbage: collections need not look at it.
    pipe.send(STARTED)
    while True:
        try:
            call: Call = pipe.recv()
            # Also threads of the pool that backward uses: they live on, and count as those of the first call.
            with ProcessState(generators=True):
                _surround(call)
                leftovers = _answer(call, rank, world_size, pipe)
            torch.set_num_threads(1)
            pipe.send(leftovers)
        except (EOFError, BrokenPipeError):
            return


def _surround(call: Call) -> None:
    os.environ.clear()
    os.environ.update(call.variables)
    os.chdir(call.folder)
    sys.path[:] = call.modules
    # Else the workers of a DataLoader would come from a fork server too, of their own, which imports torch anew.
    multiprocessing.set_start_method(call.start_method, force=True)


def _answer(call: Call, rank: int, world_size: int, pipe: Connection) -> Leftovers:
    """Call the function, send what came of it, and wait until all ranks have returned.

    A group that is destroyed while another rank is in a collective would fail that rank.
    """
    surroundings = Surroundings()
    with stacks_left_in(Path(call.stacks), call.timeout):
        pipe.send(_outcome(call, rank, world_size))
        pipe.recv()
        if call.process_group is not None and dist.is_initialized():
            dist.destroy_process_group()
    return Leftovers(surroundings.put_back(), surroundings.still_running())


def _outcome(call: Call, rank: int, world_size: int) -> bytes | Failure:
    try:
        if call.process_group is not None:
            dist.init_process_group(
                call.process_group,
                init_method=f"file://{call.rendezvous}",
                rank=rank,
                world_size=world_size,
                # Later than the caller's, whose error tells where every rank is.
                timeout=timedelta(seconds=call.timeout + 10),
            )
        fn, args = pickle.loads(call.work)
        # Pickled here, by value: what multiprocessing sends of a tensor is a handle that ends with the process.
        return pickle.dumps(fn(*args))
    except BaseException as error:
        return Failure.of_exception(rank, error)
