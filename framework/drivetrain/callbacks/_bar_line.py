"""The text of a progress bar's line, shortened to the width of the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_MAX_BAR_WIDTH = 24  # columns
_MIN_BAR_WIDTH = 6  # columns


class Phase:
    """Progress of one training epoch, validation, test or prediction, counted in micro-batches.

    Args:
        title: the name that is shown.
        total: the number of micro-batches; infinite if unknown.
        started: start time, in seconds of `time.monotonic`.
        first: the number of micro-batches that were completed before a resume.
    """

    __slots__ = ("done", "first", "paused", "started", "title", "total")

    def __init__(self, title: str, total: float, started: float, first: int = 0) -> None:
        self.title = title
        self.total = total
        self.done = self.first = first
        self.started = started
        self.paused = 0.0

    @property
    def counted(self) -> int:
        """The number of micro-batches completed since the start, which excludes those from before a resume."""
        return max(self.done - self.first, 0)

    @property
    def is_bounded(self) -> bool:
        """Whether the total is known and has not been exceeded."""
        return 0 < self.total < math.inf and self.done <= self.total

    @property
    def count(self) -> str:
        """The number of completed micro-batches as text, with the total if there is one."""
        return f"{self.done}/{self.total}" if self.is_bounded else f"{self.done}"

    def elapsed(self, now: float) -> float:
        """Return the seconds since the start, without validations in between."""
        return max(now - self.started - self.paused, 0.0)

    def rate(self, now: float) -> float:
        """Return the micro-batches per second; 0 if unknown."""
        elapsed = self.elapsed(now)
        return self.counted / elapsed if elapsed > 0 else 0.0

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds to the end; None if unknown."""
        rate = self.rate(now)
        if not self.is_bounded or rate == 0:
            return None
        return (self.total - self.done) / rate

    def speed(self, now: float) -> list[str]:
        """Return the time since the start and the rate as texts."""
        return [format_time(self.elapsed(now)), format_rate(self.rate(now))]


class BarLine(NamedTuple):
    """The parts of a line that fits the terminal.

    Attributes:
        title: the name of the phase.
        width: the number of columns of the bar; 0 for no bar.
        filled: the number of columns of the bar that are filled.
        rest: the text after the bar, with counts, times and metrics.
    """

    title: str
    width: int
    filled: int
    rest: str


def fit_line(phase: Phase, metrics: Mapping[str, float], now: float, run: str, width: int) -> BarLine:
    """Return the line of a phase, shortened to ``width`` columns.

    If the line is too long, metrics are dropped first, starting with the last metric. The first metric is kept longer
    than the bar, the speed and the times.

    Args:
        phase: the phase to show.
        metrics: values by name.
        now: seconds of `time.monotonic`.
        run: text about the remaining time of the whole run; "" for none.
        width: the number of columns of the terminal.
    """
    elapsed, rate = phase.speed(now)
    seconds_left = phase.seconds_left(now)
    times = elapsed if seconds_left is None else f"{elapsed}<{format_time(seconds_left)}"
    run_left = [run] if run else []
    full = [phase.count, f"[{times}, {rate}]", *run_left]
    shorter = [full, [phase.count, f"[{times}]", *run_left], [phase.count, *run_left], [phase.count]]
    layouts = [(_MIN_BAR_WIDTH if phase.is_bounded else 0, full), *((0, parts) for parts in shorter)]
    shown = format_metrics(metrics)
    free_columns = width - len(phase.title)
    fitting = (layout for layout in _by_preference(layouts, shown) if _width(*layout) <= free_columns)
    bar, parts = next(fitting, (0, [phase.count]))
    if bar:
        bar = min(_MAX_BAR_WIDTH, bar + free_columns - _width(bar, parts))
    filled = bar * phase.done // int(phase.total) if bar else 0
    return BarLine(phase.title[:width], bar, filled, " ".join(parts)[: max(free_columns - 1, 0)])


def _by_preference(layouts: Sequence[tuple[int, list[str]]], metrics: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield each layout of a line with all metrics, with fewer metrics and "…", and, last, without metrics."""
    for bar, parts in layouts:
        for shown in range(len(metrics), 0, -1):
            yield bar, [*parts, *metrics[:shown], *(["…"] if shown < len(metrics) else [])]
    for bar, parts in layouts:
        yield bar, parts


def _width(bar: int, parts: list[str]) -> int:
    """Return the columns that the bar and ``parts`` take after the title."""
    return (bar + 3 if bar else 0) + sum(len(part) + 1 for part in parts)


def format_metrics(metrics: Mapping[str, float]) -> list[str]:
    """Return each metric as text, such as ``loss=0.1235``."""
    return [f"{name}={format_number(value)}" for name, value in metrics.items()]


def format_time(seconds: float) -> str:
    """Format ``seconds`` as ``m:ss``, ``h:mm:ss`` or ``1d h:mm:ss``."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24}:{minutes:02d}:{whole % 60:02d}"
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def format_rate(rate: float) -> str:
    """Format a rate as ``it/s``, or as ``s/it`` below one per second."""
    return f"{1 / rate:.2f} s/it" if 0 < rate < 1 else f"{rate:.1f} it/s"


def format_number(value: float) -> str:
    """Format a metric with four significant digits."""
    return f"{value:.0f}" if math.isfinite(value) and value == int(value) and abs(value) < 1e6 else f"{value:.4g}"
