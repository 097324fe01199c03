"""When a rank fails: all learn of it, nobody waits for ever, and the user sees the cause."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from drivetrain._distributed.control_plane import ControlPlane, absent_error
from drivetrain._distributed.failure import AbsentRanksError, Failure, RankFailedError, first_cause
from drivetrain.errors import DistributedError
from drivetrain.launchers import World

Answer = TypeVar("Answer")

_HEAR = timedelta(seconds=10)
"""How long a rank that lost its connection waits to hear why."""

_LOOK = timedelta(seconds=0.2)
"""How long it waits for a report before it asks after the processes."""

_TIMED_OUT = ("Timed out waiting", "Watchdog caught collective operation timeout")
"""What gloo and NCCL say where a rank did not come."""

_BRIEF = timedelta(seconds=1)
"""How long one stays that has waited for the others: they have waited too."""

_LINGER = timedelta(seconds=5)
"""How long a failed rank stays, so that the others can hear from it."""


_STORE = timedelta(seconds=10)
"""How long the store may take to answer: behind a cut cable a request would wait for the system's limit, 15 minutes."""


def tell_others(control: ControlPlane, failure: Failure) -> None:
    """Leave word of this rank's failure. Before the process group is dropped: the others then fall out and look."""
    try:
        _within(_STORE, lambda: control.report_failure(failure))
    except RuntimeError:
        return  # the store went with the process that hosted it


def error_to_report(control: ControlPlane, error: BaseException) -> BaseException:
    """Return an error that says where the others are, for one that says only that they did not come in time."""
    if not any(text in str(error) for text in _TIMED_OUT):
        return error
    try:
        if _within(_STORE, lambda: control.first_failure(_LOOK)) is not None:
            return error
        where = _within(_HEAR + _STORE, lambda: control.collect_stacks(late=True))
    except RuntimeError:
        return error
    told = absent_error(
        f"Rank {control.rank} waited in a collective, and not all of rank(s) {list(where)} came in time.",
        str(error).splitlines()[0],
        "see what the rank that is elsewhere waits for; where it only takes long, raise the strategy's timeout "
        "or step_timeout.",
        where,
        control.records(),
    )
    told.__cause__ = error
    return told


def cause_of(
    control: ControlPlane, world: World | None, failure: Failure, error: BaseException
) -> tuple[BaseException, int | None]:
    """Return what to raise, and the rank that tells of it in this one's place, if any.

    That is the error itself, or where it only follows from another rank's, that one. Where all ranks run into the same
    error, the lowest tells of it.
    """
    is_cause = failure.distance == 0 or isinstance(error, RankFailedError)
    try:
        if isinstance(error, AbsentRanksError):
            _within(_HEAR, lambda: control.settle(_BRIEF))
            return error, None
        if is_cause:
            # Who calls a function in other processes hosts their store itself: there is nothing to stay for.
            linger = _BRIEF if world is not None and world.has_external_store else _LINGER
            return error, _within(linger + _STORE, lambda: _told_by(control, failure, linger))
        return _within(_HEAR + _STORE, lambda: _cause_elsewhere(control, world, failure, error)), None
    except RuntimeError:
        if failure.distance < 2 or is_cause:
            return error, None
        return _lost(failure, "the store where all ranks meet"), None


def _told_by(control: ControlPlane, failure: Failure, linger: timedelta) -> int | None:
    end = time.monotonic() + linger.total_seconds()
    alike = [one.rank for one in control.all_failures(linger) if one.is_same_error(failure)]
    control.settle(timedelta(seconds=max(0.0, end - time.monotonic())))
    lowest = min(alike, default=failure.rank)
    return lowest if lowest < failure.rank else None


def _cause_elsewhere(
    control: ControlPlane, world: World | None, failure: Failure, error: BaseException
) -> BaseException:
    cause = _hear_of_cause(control, world)
    silent = control.silent_ranks()
    control.settle(timedelta(0))
    if cause is not None and cause.distance < failure.distance:
        return RankFailedError(cause)
    if failure.distance == 2 and silent:
        return _lost(failure, f"rank {', '.join(map(str, silent))}")
    return error


def _lost(failure: Failure, whom: str) -> DistributedError:
    # What the connection itself said stays a part of it, by which it is known for a consequence and no cause.
    return DistributedError(
        f"Rank {failure.rank} has lost {whom}: {failure.message}",
        "it did not say why it left: it was killed, its machine went down, or the network between them did",
        "look at what it printed last, and at its machine's log; under torchrun --max-restarts a run with "
        "ckpt_path='auto' goes on by itself",
    )


def _hear_of_cause(control: ControlPlane, world: World | None) -> Failure | None:
    """Wait for word of the cause: from the rank itself, or from whoever watches its process."""
    end = time.monotonic() + _HEAR.total_seconds()
    while True:
        cause = control.first_failure(_LOOK)
        if cause is not None and cause.distance == 0:
            return cause
        if world is not None and world.failures():
            found = first_cause(world.failures())
            control.report_failure(found)  # the others do not watch processes
            return found
        if control.all_ranks_failed() or time.monotonic() >= end:
            return cause


class _NoAnswerError(RuntimeError):
    """The store has not answered in time."""


def _within(limit: timedelta, call: Callable[[], Answer]) -> Answer:
    """Call, in a thread that is left behind where nothing comes back: a request to a store cannot be given up.

    Raises:
        RuntimeError: the store is gone, or has not answered within ``limit``.
    """
    answers: queue.SimpleQueue[tuple[Answer | None, BaseException | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=ask, name="drivetrain-failure", daemon=True).start()
    try:
        answer, error = answers.get(timeout=limit.total_seconds())
    except queue.Empty:
        raise _NoAnswerError(f"the store has not answered within {limit}") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]
