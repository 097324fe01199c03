"""Counts the bytecodes that the interpreter executes in a step, function by function; independent of machine load."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def bytecodes_a_step(run: Callable[[int], Any], short: int = 50, long: int = 150) -> dict[str, float]:
    """Return the bytecodes per step of ``run(steps)``, for each function that this thread runs; start-up and end drop
    out.
    """
    _bytecodes(run, short)  # warm-up: one-time work and imports; Python 3.12 also prepares code for counting here
    few, many = (_bytecodes(run, steps) for steps in (short, long))
    found: Counter[str] = Counter()
    for code, count in many.items():
        found[code.co_qualname] += count - few[code]
    return {name: count / (long - short) for name, count in found.items() if count}


def _bytecodes(run: Callable[[int], Any], steps: int) -> Counter[CodeType]:
    counts: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            counts[frame.f_code] += 1
        return note

    sys.settrace(note)
    try:
        run(steps)
    finally:
        sys.settrace(None)
    return counts
