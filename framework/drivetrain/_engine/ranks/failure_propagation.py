"""Propagates a rank's failure, so that all ranks end and the user sees the error that caused the failure."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TypeVar

from drivetrain._distributed.control_plane import ControlPlane, absent_error
from drivetrain._distributed.failure import AbsentRanksError, Failure, RankFailedError, first_cause
from drivetrain._distributed.failure_exchange import FailureExchange
from drivetrain.errors import DistributedError

Answer = TypeVar("Answer")

_CAUSE_TIMEOUT = timedelta(seconds=10)
"""How long a rank that lost its connection waits until another rank reports the cause."""

_POLL_INTERVAL = timedelta(seconds=0.2)
"""How long a rank waits for a report in the store before it checks whether processes have exited."""

_TIMEOUT_MESSAGES = ("Timed out waiting", "Watchdog caught collective operation timeout")
"""Texts of gloo's and NCCL's errors for a rank that did not join a collective in time."""

_SHORT_LINGER = timedelta(seconds=1)
"""How long a failed rank stays if it has waited for the other ranks already, or if another process hosts the store."""

_LINGER = timedelta(seconds=5)
"""How long a failed rank stays alive, so that the other ranks can read its report from the store that it may host."""

_STORE_TIMEOUT = timedelta(seconds=10)
"""The limit for a request to the store. After a network failure, a request would block for 15 minutes."""


def publish_failure(control: ControlPlane, failure: Failure) -> None:
    """Report this rank's failure to the other ranks.

    Call the function before the process group is destroyed: destroying it makes the collectives of the other ranks
    fail, and these ranks then look for a report.
    """
    if control.failures is not None:
        with contextlib.suppress(RuntimeError):  # the process that hosted the store has exited
            _call_with_timeout(_STORE_TIMEOUT, partial(control.failures.report, failure))


def error_to_report(control: ControlPlane, error: BaseException) -> BaseException:
    """Return ``error``; for the timeout of a collective, return an error with the stacks of the other ranks."""
    is_timeout = isinstance(error, RuntimeError) and any(text in str(error) for text in _TIMEOUT_MESSAGES)
    if control.failures is None or not is_timeout:
        return error
    try:
        if _call_with_timeout(_STORE_TIMEOUT, partial(control.failures.first, _POLL_INTERVAL)) is not None:
            return error
        stacks = _call_with_timeout(_CAUSE_TIMEOUT + _STORE_TIMEOUT, lambda: control.collect_stacks(late=True))
    except RuntimeError:
        return error
    located = absent_error(
        f"Rank {control.rank} waited in a collective, and not all of rank(s) {list(stacks)} joined it in time.",
        str(error).splitlines()[0],
        "find out what the rank that has not joined is waiting for. If it is only slow, raise the strategy's timeout "
        "or step_timeout.",
        stacks,
        control.records(),
    )
    located.__cause__ = error
    return located


def resolve_cause(
    control: ControlPlane, failure: Failure, error: BaseException, store_outlives_ranks: bool
) -> tuple[BaseException, int | None]:
    """Return the error to raise, and the rank that prints the traceback; None if this rank prints it.

    The error is ``error`` itself or, if another rank's failure has caused it, a `RankFailedError` with the cause.
    If all ranks fail with the same error, only the lowest rank prints the traceback.

    Args:
        control: connects the ranks.
        failure: the failure of this rank, which has been published.
        error: the error of this rank.
        store_outlives_ranks: whether no rank hosts the store, so that no rank depends on this one.
    """
    exchange = control.failures
    if exchange is None:
        return error, None
    is_cause = failure.distance == 0 or isinstance(error, RankFailedError)
    try:
        if isinstance(error, AbsentRanksError):
            _call_with_timeout(_CAUSE_TIMEOUT, partial(exchange.wait_for_acknowledgements, _SHORT_LINGER))
            return error, None
        if is_cause:
            linger = _SHORT_LINGER if store_outlives_ranks else _LINGER
            lowest = partial(_lowest_rank_with_same_error, exchange, failure, linger)
            return error, _call_with_timeout(linger + _STORE_TIMEOUT, lowest)
        find = partial(_find_cause_elsewhere, exchange, failure, error)
        return _call_with_timeout(_CAUSE_TIMEOUT + _STORE_TIMEOUT, find), None
    except RuntimeError:
        if failure.distance < 2 or is_cause:
            return error, None
        return _lost_connection_error(failure, "the store where all ranks meet"), None


def _lowest_rank_with_same_error(exchange: FailureExchange, failure: Failure, linger: timedelta) -> int | None:
    """Wait for the other ranks' failures. Return the lowest rank with the same error, or None if it is this rank."""
    end = time.monotonic() + linger.total_seconds()
    ranks = [other.rank for other in exchange.all(linger) if other.is_same_error(failure)]
    exchange.wait_for_acknowledgements(timedelta(seconds=max(0.0, end - time.monotonic())))
    lowest = min(ranks, default=failure.rank)
    return lowest if lowest < failure.rank else None


def _find_cause_elsewhere(exchange: FailureExchange, failure: Failure, error: BaseException) -> BaseException:
    cause = _wait_for_cause(exchange)
    silent = exchange.silent_ranks()
    exchange.wait_for_acknowledgements(timedelta(0))
    if cause is not None and cause.distance < failure.distance:
        return RankFailedError(cause)
    if failure.distance == 2 and silent:
        return _lost_connection_error(failure, f"rank {', '.join(map(str, silent))}")
    return error


def _lost_connection_error(failure: Failure, peer: str) -> DistributedError:
    # The message of the connection error is part of the text, because `Failure.distance` searches for it.
    return DistributedError(
        f"Rank {failure.rank} has lost {peer}: {failure.message}",
        "it reported no error: it was killed, its machine went down, or the network between them failed",
        "look at its last output and at its machine's log; under torchrun --max-restarts a run with "
        "ckpt_path='auto' resumes by itself",
    )


def _wait_for_cause(exchange: FailureExchange) -> Failure | None:
    """Wait until the rank that failed first, or the launcher that watches its process, reports the cause."""
    end = time.monotonic() + _CAUSE_TIMEOUT.total_seconds()
    while True:
        cause = exchange.first(_POLL_INTERVAL)
        if cause is not None and cause.distance == 0:
            return cause
        failed_processes = exchange.external()
        if failed_processes:
            failed_process = first_cause(failed_processes)
            exchange.report(failed_process)  # the other ranks do not watch processes
            return failed_process
        if not exchange.silent_ranks() or time.monotonic() >= end:
            return cause


def _call_with_timeout(limit: timedelta, call: Callable[[], Answer]) -> Answer:
    """Make a request to the store in a daemon thread. A timeout abandons the thread, as requests cannot be cancelled.

    Raises:
        RuntimeError: the store has exited, or has not answered within ``limit``.
    """
    answers: queue.SimpleQueue[tuple[Answer | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=run, name="drivetrain-failure", daemon=True).start()
    try:
        answer, error = answers.get(timeout=limit.total_seconds())
    except queue.Empty:
        raise RuntimeError(f"the store has not answered within {limit}") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]
