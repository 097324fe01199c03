"""Times loops in turn, as the slope between two numbers of steps, so that start-up drops out."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Loop = Callable[[int], float]
"""Trains for so many steps and returns a checksum of the weights."""


@dataclass(slots=True)
class Slopes:
    """What a step costs, a value for each round.

    Attributes:
        wall: seconds by the clock.
        busy: seconds of the processor that this process took; waiting for others is not in it.
    """

    wall: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)


def time_loops(
    loops: Mapping[str, Loop], short: int, long: int, rounds: int, meet: Callable[[], None] | None = None
) -> dict[str, Slopes]:
    """Run all loops in every round, each for ``short`` and for ``long`` steps.

    Args:
        loops: by name.
        short: steps of the run whose time is taken off.
        long: steps of the other.
        rounds: how often.
        meet: waits for the other ranks, before each run.

    Raises:
        SystemExit: the weights differ, so that the loops did different work.
    """
    slopes = {name: Slopes() for name in loops}
    for _ in range(rounds):
        checksums = {}
        for name, loop in loops.items():
            (wall, busy, _), (longer, busier, checksum) = (_timed(loop, steps, meet) for steps in (short, long))
            slopes[name].wall.append((longer - wall) / (long - short))
            slopes[name].busy.append((busier - busy) / (long - short))
            checksums[name] = checksum
        if len(set(checksums.values())) > 1:
            raise SystemExit(f"The loops did different work, their weights sum to {checksums}")
    return slopes


def _timed(loop: Loop, steps: int, meet: Callable[[], None] | None) -> tuple[float, float, float]:
    gc.collect()
    if meet is not None:
        meet()
    wall, busy = time.perf_counter(), time.process_time()
    checksum = loop(steps)
    return time.perf_counter() - wall, time.process_time() - busy, checksum


def cells(slopes: Slopes, base: Slopes, unit: float, digits: int) -> list[str]:
    """Four cells of a table: by the clock and by the processor, in units of so many seconds, each with its ratio.

    Ratios are taken round by round: what ran one after the other is compared.
    """
    row = []
    for values, others in ((slopes.wall, base.wall), (slopes.busy, base.busy)):
        row.append(spread([value / unit for value in values], digits))
        row.append("" if slopes is base else spread(ratios(values, others), 3))
    return row


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """One over the other, round by round."""
    return [value / other for value, other in zip(values, others, strict=True)]


def over(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """What the one takes more than the other, round by round."""
    return [value - other for value, other in zip(values, others, strict=True)]


def spread(values: Sequence[float], digits: int) -> str:
    """``median (minimum to maximum)``."""
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"
