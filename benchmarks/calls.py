"""Counts the Python functions that a step calls: a measure of overhead that is the same on a busy machine."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest.mock import patch

from drivetrain._loops import stopping

_RUNS = 5


def python_calls_a_step(run: Callable[[int], Any], short: int = 5, long: int = 15, runs: int = _RUNS) -> float:
    """How many calls one step of ``run(steps)`` makes on this thread, whatever it does before and after.

    Comparisons by ``__eq__`` are left out, and what they call: how often a hash table compares two of torch's objects
    depends on where in memory they lie. Under FSDP that is 430 to 500 calls a step, by process. So is what walks the
    stack, as torch 2.11 does for each operation that DTensor has not seen: the deeper the stack, the more calls.
    """
    # Where steps are long, on a busy machine too, a run looks by the clock whether it is to leave: here every 16 steps.
    with patch.object(stopping, "_LOOK", 1e6):
        run(2)  # what is done and imported once
        few, many = (python_calls(run, steps, runs) for steps in (short, long))
    return (many - few) / (long - short)


def python_calls(run: Callable[[int], Any], steps: int, runs: int = _RUNS) -> int:
    """How many calls ``run(steps)`` makes, likewise, from its start to its end."""
    # Who waits for others asks more or less often; all else is the same in every run.
    return min(_calls(run, steps) for _ in range(runs))


def _calls(run: Callable[[int], Any], steps: int) -> int:
    count = 0
    apart: FrameType | None = None

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count, apart
        if apart is not None:
            if event == "return" and frame is apart:
                apart = None
        elif event == "call":
            if frame.f_code.co_name == "__eq__" or frame.f_code.co_filename == traceback.__file__:
                apart = frame
            else:
                count += 1

    sys.setprofile(note)
    try:
        run(steps)
    finally:
        sys.setprofile(None)
    return count
