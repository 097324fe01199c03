"""Estimates the remaining time of a run from its limits and its pace so far."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from drivetrain._config.argument_checks import parse_duration

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext


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
