"""Counts the Python functions that a step calls: a measure of overhead that is the same on a busy machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_RUNS = 8


def python_calls_a_step(run: Callable[[int], Any], short: int = 5, long: int = 15) -> float:
    """How many calls one step of ``run(steps)`` makes on this thread, whatever it does before and after."""
    run(2)  # what is done and imported once
    # Who waits for others asks more or less often; all else is the same in every run.
    few, many = (min(_calls(run, steps) for _ in range(_RUNS)) for steps in (short, long))
    return (many - few) / (long - short)


def _calls(run: Callable[[int], Any], steps: int) -> int:
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run(steps)
    finally:
        sys.setprofile(None)
    return count
