"""rank_zero_only: a function that rank 0 alone runs, before a run, in it and after it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from drivetrain.environments import detect_environment
from drivetrain.launchers.world import current_world

P = ParamSpec("P")
T = TypeVar("T")


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Return ``function`` so that only rank 0 runs it; on other ranks the call returns None.

    For what has no part in the collective calls of a run: writing a file, printing. Before a run the rank is what those
    who started the process have said (torchrun, SLURM, MPI, ...), and 0 where nobody has.
    """

    @wraps(function)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if this_rank() == 0 else None

    return on_rank_zero


def this_rank() -> int:
    """The rank of this process among all, as far as it is known."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    world = current_world()
    if world is not None:
        return world.placement.rank
    environment = detect_environment()
    return environment.placement().rank if environment.started_us else 0
