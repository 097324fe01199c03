"""Stepping learning-rate schedulers: once an optimizer step or an epoch, alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from drivetrain.errors import ConfigurationError, nearest
from drivetrain.loops.optimizers import SchedulerConfig

StepScheduler = Callable[[Any, Any], None]


class Schedulers:
    """Steps the schedulers of a run.

    Args:
        configs: the schedulers.
        step: the module's ``lr_scheduler_step`` where it overrides it; None for the plain way.
        monitored: returns a logged value by name, the same on every rank, or None where nobody has logged it.
        known: names of what is logged, for the error.
    """

    def __init__(
        self,
        configs: Sequence[SchedulerConfig],
        step: StepScheduler | None,
        monitored: Callable[[str], float | None],
        known: Callable[[], Sequence[str]],
    ) -> None:
        self._by_step = [config for config in configs if config.interval == "step"]
        self._by_epoch = [config for config in configs if config.interval == "epoch"]
        self._step = step
        self._monitored = monitored
        self._known = known
        self.has_step_schedulers = bool(self._by_step)

    def after_step(self, global_step: int) -> None:
        """Step those that go by optimizer steps."""
        for config in self._by_step:
            if global_step % config.frequency == 0:
                self._one(config)

    def after_epoch(self, epochs: int) -> None:
        """Step those that go by epochs; ``epochs`` are completed."""
        for config in self._by_epoch:
            if epochs % config.frequency == 0:
                self._one(config)

    def _one(self, config: SchedulerConfig) -> None:
        value = None
        if config.monitor is not None and isinstance(config.scheduler, ReduceLROnPlateau):
            value = self._monitored(config.monitor)
            if value is None:
                known = self._known()
                raise ConfigurationError(
                    f"ReduceLROnPlateau monitors {config.monitor!r}, which was not logged."
                    f"{nearest(config.monitor, known)}",
                    f"logged are: {', '.join(known) or 'no values'}.",
                    "log it before the scheduler steps, or monitor another value.",
                )
        if self._step is not None:
            self._step(config.scheduler, value)
        elif value is None:
            config.scheduler.step()
        else:
            config.scheduler.step(value)
