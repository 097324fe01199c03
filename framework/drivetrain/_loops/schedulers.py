"""Stepping learning-rate schedulers: once an optimizer step or an epoch, alike on all ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain._loops.configured_optimizers import SchedulerConfig
from drivetrain.errors import ConfigurationError, nearest

logger = logging.getLogger("drivetrain")

StepScheduler = Callable[[Any, Any], None]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a schedule may have been built on.

    Attributes:
        steps: optimizer steps of the whole run, as they were estimated.
        length: micro-batches of an epoch that this rests on; None where it does not.
        asked: whether anybody asked for the estimate.
    """

    steps: int | float = math.inf
    length: int | None = None
    asked: bool = False


class Schedulers:
    """Steps the schedulers of a run.

    Args:
        configs: the schedulers.
        step: the module's ``lr_scheduler_step`` where it overrides it; None for the plain way.
        monitored: returns a logged value by name, the same on every rank, or None where nobody has logged it.
        known: names of what is logged, for the error.
        outlook: how long the run should take.
        tells: whether this rank says what is amiss.
    """

    def __init__(
        self,
        configs: Sequence[SchedulerConfig],
        step: StepScheduler | None,
        monitored: Callable[[str], float | None],
        known: Callable[[], Sequence[str]],
        outlook: Outlook | None = None,
        tells: bool = True,
    ) -> None:
        self._outlook = outlook or Outlook()
        self._tells = tells
        self._said: set[str] = set()
        self._by_step = [config for config in configs if config.interval == "step"]
        self._by_epoch = [config for config in configs if config.interval == "epoch"]
        self._step = step
        self._monitored = monitored
        self._known = known
        self.has_step_schedulers = bool(self._by_step)

    def after_step(self, global_step: int) -> None:
        """Step those that go by optimizer steps.

        Raises:
            ConfigurationError: one was built on a length that proved wrong, and has run out.
        """
        if global_step > self._outlook.steps:
            self._after_the_last(global_step)
            return
        for config in self._by_step:
            if global_step % config.frequency == 0:
                self._one(config)

    def after_epoch(self, epochs: int) -> None:
        """Step those that go by epochs; ``epochs`` are completed."""
        for config in self._by_epoch:
            if epochs % config.frequency == 0:
                self._one(config)

    def _after_the_last(self, global_step: int) -> None:
        """Step where the run has made more steps than it was to make."""
        for config in self._by_step:
            if self._outlook.asked and global_step == self._outlook.steps + 1 and _is_at_zero(config):
                raise self._ran_out(config)
            if global_step % config.frequency == 0:
                try:
                    self._one(config)
                except ValueError as error:  # OneCycleLR's
                    raise self._ran_out(config) from error

    def _ran_out(self, config: SchedulerConfig) -> ConfigurationError:
        steps, length = self._outlook.steps, self._outlook.length
        return ConfigurationError(
            f"{type(config.scheduler).__name__} ran out after {steps} steps, and there is more data.",
            f"trainer.estimated_stepping_batches was {steps}, by the training loader's length of {length} "
            "micro-batches an epoch; more came.",
            "correct len(loader), bound the epoch with limit_train_batches, or give the schedule steps of its own.",
        )

    def _one(self, config: SchedulerConfig) -> None:
        value = None
        if config.plateau and config.monitor is not None:
            value = self._monitored(config.monitor)
            if value is None:
                self._missing(config, config.monitor)
                return
        if self._step is not None:
            self._step(config.scheduler, value)
        elif value is None:
            config.scheduler.step()
        else:
            config.scheduler.step(value)

    def _missing(self, config: SchedulerConfig, monitor: str) -> None:
        known = self._known()
        what = f"{type(config.scheduler).__name__} monitors {monitor!r}, which was not logged.{nearest(monitor, known)}"
        listed = f"logged are: {', '.join(known) or 'no values'}."
        if config.strict:
            raise ConfigurationError(
                what,
                listed,
                "log it before the scheduler steps, monitor another value, or pass over steps without it by "
                "'strict': False.",
            )
        if monitor not in self._said and self._tells:
            logger.warning("%s %s It does not step then, because of 'strict': False. Said once.", what, listed)
        self._said.add(monitor)


def _is_at_zero(config: SchedulerConfig) -> bool:
    """Whether its optimizer stands still: what trains on would train nothing."""
    optimizer = getattr(config.scheduler, "optimizer", None)
    return optimizer is not None and all(float(group["lr"]) == 0.0 for group in optimizer.param_groups)
