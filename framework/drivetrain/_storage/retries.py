"""Repeats requests to a store that may be busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds between attempts


def retried(
    work: Callable[[], T],
    retries: int = len(PAUSES),
    permanent: tuple[type[Exception], ...] = (PermissionError,),
) -> T:
    """Return the result of ``work``, which is repeated if it fails, after increasing pauses.

    Args:
        work: the work.
        retries: how often it is repeated, at most ``len(PAUSES)`` times.
        permanent: the errors against which a repetition does not help.
    """
    for pause in PAUSES[:retries]:
        try:
            return work()
        except permanent:
            raise
        except Exception:  # error classes depend on the store's library
            time.sleep(pause)
    return work()
