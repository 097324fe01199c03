"""When a rank fails: all learn of it, nobody waits for ever, and the user sees the cause."""

from __future__ import annotations

import time
from datetime import timedelta

from drivetrain.control import ControlPlane
from drivetrain.failure import Failure, RankFailedError, first_cause
from drivetrain.launchers import World

_HEAR = timedelta(seconds=10)
"""How long a rank that lost its connection waits to hear why."""

_LOOK = timedelta(seconds=0.2)
"""How long it waits for a report before it asks after the processes."""

_LINGER = timedelta(seconds=5)
"""How long a failed rank stays, so that the others can hear from it."""


def tell_others(control: ControlPlane, failure: Failure) -> None:
    """Leave word of this rank's failure. Before the process group is dropped: the others then fall out and look."""
    try:
        control.report_failure(failure)
    except RuntimeError:
        return  # the store went with the process that hosted it


def cause_of(control: ControlPlane, world: World | None, failure: Failure, error: BaseException) -> BaseException:
    """Return what to raise: the error itself, or where it only follows from another rank's, that one."""
    try:
        if failure.distance == 0 or isinstance(error, RankFailedError):
            control.settle(_LINGER)
            return error
        cause = _hear_of_cause(control, world)
        control.settle(timedelta(0))
        return error if cause is None or cause.distance >= failure.distance else RankFailedError(cause)
    except RuntimeError:
        return error


def _hear_of_cause(control: ControlPlane, world: World | None) -> Failure | None:
    """Wait for word of the cause: from the rank itself, or from whoever watches its process."""
    end = time.monotonic() + _HEAR.total_seconds()
    while True:
        cause = control.first_failure(_LOOK)
        if cause is not None and cause.distance == 0:
            return cause
        if world is not None and world.failures():
            return first_cause(world.failures())
        if control.everybody_failed() or time.monotonic() >= end:
            return cause
