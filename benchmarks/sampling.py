"""Samples the main thread many times a second, and attributes each sample to a part of a step.

`sys.setprofile` and cProfile add time to every Python call, which inflates code with many calls. A timer's signal
interrupts the program between two bytecodes or when a C function returns.
"""

from __future__ import annotations

import signal
from collections import Counter
from types import FrameType

from benchmarks.parts import part_of
from benchmarks.slopes import Loop

INTERVAL = 0.00037  # seconds; chosen not to be a multiple of the duration of a step


def parts_of_a_step(loop: Loop, short: int, long: int) -> dict[str, float]:
    """Return the share of a step that each part takes; work before and after the steps is removed, as in a slope."""
    few, many = (_samples(loop, steps) for steps in (short, long))
    counts = {part: max(many[part] - few[part], 0) for part in many}
    return {part: count / sum(counts.values()) for part, count in counts.items()}


def _samples(loop: Loop, steps: int) -> Counter[str]:
    counts: Counter[str] = Counter()

    def note(number: int, frame: FrameType | None) -> None:
        signal.set_wakeup_fd(-1)  # otherwise each sample would wake the engine's thread that listens for signals
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
