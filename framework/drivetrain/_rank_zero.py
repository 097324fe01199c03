"""Functions that only rank 0 runs, before, during and after a run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from drivetrain._runtime.console import log_to_console
from drivetrain.environments.detection import rank_of_environment
from drivetrain.launchers.launched_processes import current_processes

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("drivetrain")


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Return a function that calls ``function`` on rank 0 and returns None on the other ranks.

    Use the decorator for work without collectives, such as writing a file or printing. Before a run, the environment
    (torchrun, SLURM, MPI, ...) determines the rank, or the rank is 0 if no environment does.
    """

    @wraps(function)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if this_rank() == 0 else None

    return on_rank_zero


@rank_zero_only
def rank_zero_info(message: object, *args: Any, stacklevel: int = 1, **kwargs: Any) -> None:
    """Log a message on rank 0, with the arguments of `logging.info`. Without a configuration, it goes to stderr."""
    with log_to_console(True):
        logger.info(message, *args, stacklevel=stacklevel + 2, **kwargs)


@rank_zero_only
def rank_zero_warn(message: str | Warning, *, stacklevel: int = 1, **kwargs: Any) -> None:
    """Issue a warning on rank 0, with the arguments of `warnings.warn`."""
    warnings.warn(message, stacklevel=stacklevel + 2, **kwargs)


def this_rank() -> int:
    """Return the global rank of this process, or 0 if the rank is not known yet."""
    if dist.is_initialized():
        return dist.get_rank()
    processes = current_processes()
    return rank_of_environment() if processes is None else processes.placement.rank
