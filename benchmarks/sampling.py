"""Looks at the main thread many times a second, and notes to which part of a step its time goes.

`sys.setprofile` and cProfile take time at every Python call, and so show more of whoever calls much. A timer's signal
interrupts whatever runs, between two bytecodes or as a C function returns.
"""

from __future__ import annotations

import signal
from collections import Counter
from types import FrameType

from benchmarks.parts import part_of
from benchmarks.slopes import Loop

INTERVAL = 0.00037  # seconds; no multiple of what runs


def parts_of_a_step(loop: Loop, short: int, long: int) -> dict[str, float]:
    """What share of a step each part takes; what comes before and after the steps drops out, as in a slope."""
    few, many = (_samples(loop, steps) for steps in (short, long))
    counts = {part: max(many[part] - few[part], 0) for part in many}
    return {part: count / sum(counts.values()) for part, count in counts.items()}


def _samples(loop: Loop, steps: int) -> Counter[str]:
    counts: Counter[str] = Counter()

    def note(number: int, frame: FrameType | None) -> None:
        signal.set_wakeup_fd(-1)  # else the engine's thread that listens for signals would be woken by each of these
        part = part_of(frame)
        if part is not None:
            counts[part] += 1

    before = signal.signal(signal.SIGALRM, note)
    signal.setitimer(signal.ITIMER_REAL, INTERVAL, INTERVAL)
    try:
        loop(steps)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return counts
