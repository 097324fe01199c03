"""How far an epoch, an evaluation and the whole run are, and the text that says so, shortened to a terminal's width."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from drivetrain._config.argument_checks import parse_duration

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext

_MAX_BAR_WIDTH = 24  # columns
_MIN_BAR_WIDTH = 6  # columns
_MIN_WIDTH_WITH_BAR = 40  # columns after the title; narrower lines have no bar


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


class TimeLeft:
    """Estimates when training reaches the first of ``max_epochs``, ``max_steps`` and ``max_time``.

    The pace is the average time per micro-batch, including validations and checkpoints. The first micro-batches are not
    included, because they may compile or start workers. The estimate never waits for a device.

    Args:
        trainer: the run, before training starts.
        now: seconds of `time.monotonic`.
    """

    def __init__(self, trainer: RunContext, now: float) -> None:
        limit = None if trainer.max_time is None else parse_duration("max_time", trainer.max_time)
        self._deadline = None if limit is None else now + limit.total_seconds()
        self._pace_start_time, self._pace_start_batch = now, trainer.micro_batches
        self._last_count = trainer.micro_batches
        self._warmed_up = False  # whether the measurement of the pace has restarted after the first micro-batches
        self._last_pace: float | None = None

    def seconds(self, trainer: RunContext, now: float) -> float | None:
        """Return the remaining seconds, 0 at the end of the run; None if unknown."""
        pace = self._pace(trainer.micro_batches, now)
        micro_batches = _micro_batches_left(trainer)
        if micro_batches == 0:
            return 0.0
        estimates = [] if self._deadline is None else [max(self._deadline - now, 0.0)]
        if pace is not None and micro_batches < math.inf:
            estimates.append(micro_batches * pace)
        return min(estimates, default=None)

    def _pace(self, micro_batches: int, now: float) -> float | None:
        """Return the seconds per micro-batch; None before the first micro-batch is complete."""
        if micro_batches < self._last_count:  # The run rolled back to a checkpoint.
            self._pace_start_time, self._pace_start_batch = now, micro_batches
        self._last_count, completed = micro_batches, micro_batches - self._pace_start_batch
        if completed:
            self._last_pace = (now - self._pace_start_time) / completed
            if not self._warmed_up:
                self._warmed_up, self._pace_start_time, self._pace_start_batch = True, now, micro_batches
        return self._last_pace


def _micro_batches_left(trainer: RunContext) -> float:
    """Return the number of micro-batches until ``max_epochs`` or ``max_steps``; infinite if neither limit is known."""
    length, window = trainer.num_training_batches, trainer.accumulate_grad_batches
    by_epochs = by_steps = math.inf
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        epochs = trainer.max_epochs - trainer.current_epoch
        by_epochs = 0 if epochs <= 0 else epochs * length - trainer.batch_idx
    if trainer.max_steps >= 0:
        # The last accumulation window of an epoch may have fewer micro-batches.
        batches_per_step = window if math.isinf(length) or not length else length / math.ceil(length / window)
        by_steps = max(trainer.max_steps - trainer.global_step, 0) * batches_per_step
    return max(min(by_epochs, by_steps), 0)


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
    """Return the line of a phase, with a bar if the total is known, cut off at ``width`` columns.

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
    rest = " ".join(filter(None, [phase.count, f"[{times}, {rate}]", run, *format_metrics(metrics)]))
    free = max(width - len(phase.title) - 1, 0)
    bar = 0
    if phase.is_bounded and free >= _MIN_WIDTH_WITH_BAR:
        bar = min(max(free - len(rest) - 3, _MIN_BAR_WIDTH), _MAX_BAR_WIDTH)
        free -= bar + 3
    return BarLine(phase.title[:width], bar, bar * phase.done // int(phase.total) if bar else 0, rest[:free])


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
