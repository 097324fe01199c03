"""What stands in the line of a progress bar, and what of it is left out where the terminal is narrow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

_WIDEST = 24
_NARROWEST = 6


class Phase:
    """What is being counted: an epoch's micro-batches, a validation, a test, a prediction.

    Args:
        title: what it is called.
        total: micro-batches that it has; None where nothing says.
        started: seconds of `time.monotonic`.
        first: micro-batches of it that an earlier run has made.
    """

    __slots__ = ("done", "first", "paused", "started", "title", "total")

    def __init__(self, title: str, total: int | None, started: float, first: int = 0) -> None:
        self.title = title
        self.total = total
        self.done = self.first = first
        self.started = started
        self.paused = 0.0

    @property
    def counted(self) -> int:
        """Micro-batches that were seen since it started."""
        return max(self.done - self.first, 0)

    @property
    def is_bounded(self) -> bool:
        """Whether the total is known, and not proven wrong yet."""
        return bool(self.total) and self.done <= (self.total or 0)

    def elapsed(self, now: float) -> float:
        """Seconds since the start, without what a validation took in between."""
        return max(now - self.started - self.paused, 0.0)

    def rate(self, now: float) -> float:
        """Micro-batches a second, 0 where nothing can be said yet."""
        elapsed = self.elapsed(now)
        return self.counted / elapsed if elapsed > 0 else 0.0

    def left(self, now: float) -> float | None:
        """Seconds to its end; None where nothing can be said yet."""
        rate = self.rate(now)
        if not self.is_bounded or rate == 0:
            return None
        return ((self.total or 0) - self.done) / rate


class BarLine(NamedTuple):
    """The parts of a line that fits.

    Attributes:
        title: what is counted.
        width: of the bar, 0 for none.
        filled: how much of it.
        rest: counts, times and metrics.
    """

    title: str
    width: int
    filled: int
    rest: str


def fitted(phase: Phase, metrics: Mapping[str, float], now: float, run: str, width: int) -> BarLine:
    """Return what a line of ``width`` columns has room for.

    What goes first are metrics, from the last on; but the first of them stays before the bar, the speed and the times.

    Args:
        phase: what is counted.
        metrics: by name.
        now: seconds of `time.monotonic`.
        run: what is said of the whole run's time; "" for nothing.
        width: columns.
    """
    count, speed_now = str(phase.done), speed(phase.rate(now))
    left = phase.left(now)
    times = clock(phase.elapsed(now)) + ("" if left is None else f"<{clock(left)}")
    if phase.is_bounded:
        count = f"{phase.done}/{phase.total}"
    said = [f"[{times}, {speed_now}]", *([run] if run else [])]
    leaner = [[count, *said], [count, f"[{times}]", *said[1:]], [count, *said[1:]], [count]]
    shown = in_words(metrics)
    room = width - len(phase.title)
    choices = [(_NARROWEST if phase.is_bounded else 0, leaner[0]), *((0, one) for one in leaner)]
    chosen = _first_that_fits(choices, shown[:1], len(shown) > 1, room) or _first_that_fits(choices, [], False, room)
    bar, parts = chosen or (0, [count])
    for index, one in enumerate(shown):
        more = [] if index == len(shown) - 1 else ["…"]
        if _columns(bar, [*parts, one, *more]) > room:
            if index and _columns(bar, [*parts, "…"]) <= room:
                parts = [*parts, "…"]
            break
        parts = [*parts, one]
    if bar:
        bar = min(_WIDEST, bar + room - _columns(bar, parts))
    filled = bar * phase.done // (phase.total or 1) if bar else 0
    return BarLine(phase.title[:width], bar, filled, " ".join(parts)[: max(room - 1, 0)])


def _first_that_fits(
    choices: list[tuple[int, list[str]]], metric: list[str], more: bool, room: int
) -> tuple[int, list[str]] | None:
    extra = [*metric, "…"] if more else metric
    return next((one for one in choices if _columns(one[0], [*one[1], *extra]) <= room), None)


def _columns(bar: int, parts: list[str]) -> int:
    """Columns behind the title."""
    return (bar + 3 if bar else 0) + sum(len(part) + 1 for part in parts)


def in_words(metrics: Mapping[str, float]) -> list[str]:
    """Return each metric as it is shown: ``loss=0.1235``."""
    return [f"{name}={number(value)}" for name, value in metrics.items()]


def clock(seconds: float) -> str:
    """``seconds`` as ``m:ss`` or ``h:mm:ss``, with days where there are any."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24}:{minutes:02d}:{whole % 60:02d}"
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def speed(rate: float) -> str:
    """Micro-batches a second, or seconds a micro-batch where that reads better."""
    return f"{1 / rate:.2f} s/it" if 0 < rate < 1 else f"{rate:.1f} it/s"


def number(value: float) -> str:
    """A metric in four significant digits."""
    return f"{value:.0f}" if math.isfinite(value) and value == int(value) and abs(value) < 1e6 else f"{value:.4g}"
