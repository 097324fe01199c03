"""Times loops in turn, as the slope between two numbers of steps, which removes start-up time."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Name = TypeVar("Name")
Loop = Callable[[int], float]
"""Trains for so many steps and returns a checksum of the weights."""


@dataclass(slots=True)
class Slopes:
    """The cost of a step, with one value per round.

    Attributes:
        wall: wall-clock seconds.
        busy: processor seconds of this process, which do not include waiting for others.
    """

    wall: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)


def time_loops(
    loops: Mapping[Name, Loop],
    short: int,
    long: int | Mapping[Name, int],
    rounds: int,
    meet: Callable[[], None] | None = None,
    compare: Callable[[int, Mapping[Name, float]], None] | None = None,
) -> dict[Name, Slopes]:
    """Run all loops in every round, each for ``short`` and for ``long`` steps.

    Args:
        loops: by name.
        short: steps of the run whose time is subtracted.
        long: steps of the other run, for all loops or by loop.
        rounds: number of rounds.
        meet: waits for the other ranks, before each run.
        compare: used instead of `refuse_different_work` if weights cannot be equal to the last bit.

    Raises:
        SystemExit: the weights differ, so that the loops did different work.
    """
    slopes = {name: Slopes() for name in loops}
    gc.collect()
    gc.freeze()  # collecting the objects that imports created takes 100 ms, and would distort the comparison
    for _ in range(rounds):
        checksums: dict[int, dict[Name, float]] = {}
        for name, loop in loops.items():
            steps = long if isinstance(long, int) else long[name]
            (wall, busy, first), (longer, busier, last) = (_timed(loop, count, meet) for count in (short, steps))
            slopes[name].wall.append((longer - wall) / (steps - short))
            slopes[name].busy.append((busier - busy) / (steps - short))
            checksums.setdefault(short, {})[name] = first
            checksums.setdefault(steps, {})[name] = last
        for steps, sums in checksums.items():
            (compare or refuse_different_work)(steps, sums)
    gc.unfreeze()
    return slopes


def refuse_different_work(steps: int, sums: Mapping[Name, float]) -> None:
    """Compare the checksums of the weights that the loops produced.

    Raises:
        SystemExit: they differ.
    """
    if len(set(sums.values())) > 1:
        raise SystemExit(f"The loops did different work: after {steps} steps their weights sum to {sums}")


def _timed(loop: Loop, steps: int, meet: Callable[[], None] | None) -> tuple[float, float, float]:
    gc.collect()
    if meet is not None:
        meet()
    wall, busy = time.perf_counter(), time.process_time()
    checksum = loop(steps)
    return time.perf_counter() - wall, time.process_time() - busy, checksum


def cells(slopes: Slopes, base: Slopes, unit: float, digits: int) -> list[str]:
    """Return four table cells: wall-clock and processor time in units of ``unit`` seconds, each followed by its ratio.

    Ratios are taken round by round, between runs that followed each other.
    """
    row = []
    for values, others in ((slopes.wall, base.wall), (slopes.busy, base.busy)):
        row.append(spread([value / unit for value in values], digits))
        row.append("" if slopes is base else spread(ratios(values, others), 3))
    return row


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratios of ``values`` to ``others``, round by round."""
    return [value / other for value, other in zip(values, others, strict=True)]


def over(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the differences between ``values`` and ``others``, round by round."""
    return [value - other for value, other in zip(values, others, strict=True)]


def spread(values: Sequence[float], digits: int) -> str:
    """Format values as ``median (minimum to maximum)``."""
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def row(*cells: str) -> str:
    """Format the cells as a line of a table."""
    return f"| {' | '.join(cells)} |"
