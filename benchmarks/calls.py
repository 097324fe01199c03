"""Counts the Python functions that a run or a step calls: a measure of overhead that does not depend on load."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

_RUNS = 5


def python_calls_a_step(run: Callable[[int], Any], short: int = 5, long: int = 15, runs: int = _RUNS) -> float:
    """Return the number of calls that one step of ``run(steps)`` makes, without those of start-up and shutdown.

    Varying calls are left out, see `count_calls`: under FSDP they are 430 to 500 calls a step, depending on the
    process.
    """
    run(2)  # imports and caches
    few, many = (python_calls(run, steps, runs) for steps in (short, long))
    return (many - few) / (long - short)


def python_calls(run: Callable[[int], Any], steps: int, runs: int = _RUNS) -> int:
    """Return the number of calls that ``run(steps)`` makes from start to end, without varying ones."""
    # Waiting for other ranks takes a varying number of calls; the minimum has the fewest of them.
    return min(count_calls(partial(run, steps), skip_varying=True) for _ in range(runs))


def count_calls(run: Callable[[], Any], *, skip_varying: bool = False) -> int:
    """Return the number of Python functions that ``run()`` calls on this thread.

    Args:
        run: what to count.
        skip_varying: leave out ``__eq__`` and `traceback`, and all that they call. How often a hash table compares two
            objects of torch depends on their addresses. torch 2.11 walks the stack for each operation that DTensor has
            not seen, which takes more calls the deeper the stack is.
    """
    count = 0
    skipped: FrameType | None = None

    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count, skipped
        if skipped is not None:
            if event == "return" and frame is skipped:
                skipped = None
        elif event == "call":
            code = frame.f_code
            if skip_varying and (code.co_name == "__eq__" or code.co_filename == traceback.__file__):
                skipped = frame
            else:
                count += 1

    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count
