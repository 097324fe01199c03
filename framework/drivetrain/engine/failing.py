"""When a rank fails: all learn of it, nobody waits for ever, and the user sees the cause."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from drivetrain.control import ControlPlane
from drivetrain.failure import Failure, RankFailedError
from drivetrain.launchers import World

_HEAR = timedelta(seconds=10)
"""How long a rank that lost its connection waits to hear why."""

_LINGER = timedelta(seconds=5)
"""How long a failed rank stays, so that the others can hear from it."""

_ECHOES = ("connection closed by peer", "connection reset", "broken pipe", "read error", "write error", "socket")


def is_echo(error: BaseException) -> bool:
    """Whether an error only follows from another rank's: a connection whose other end is gone."""
    if isinstance(error, RankFailedError | dist.DistNetworkError | dist.DistStoreError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _ECHOES)


def tell_others(control: ControlPlane, rank: int, error: BaseException) -> None:
    """Leave word of this rank's failure. Before the process group is dropped: the others then fall out and look."""
    try:
        control.report_failure(Failure.of_exception(rank, error), is_echo(error))
    except RuntimeError:
        return  # the store went with the process that hosted it


def cause_of(control: ControlPlane, world: World | None, error: BaseException) -> BaseException:
    """Return what to raise: the error itself, or where it is an echo, the failure behind it."""
    try:
        if not is_echo(error):
            control.settle(_LINGER)
            return error
        if isinstance(error, RankFailedError):
            control.settle(_LINGER)
            return error
        failure = control.first_failure(_HEAR)
        if failure is None and world is not None:
            failure = next(iter(world.failures()), None)
        control.settle(timedelta(0))
        return error if failure is None else RankFailedError(failure)
    except RuntimeError:
        return error
