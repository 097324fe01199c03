"""Steps learning-rate schedulers, by optimizer steps or epochs, with the same values on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain._metrics import MetricStore
from drivetrain._run_state import SchedulerConfig
from drivetrain.errors import ConfigurationError, nearest

logger = logging.getLogger("drivetrain")


@dataclass(eq=False)
class Schedulers:
    """Steps the schedulers of a run.

    Attributes:
        configs: the schedulers.
        step_by_module: the module's ``lr_scheduler_step``; None if the module does not override it.
        metrics: the logged values.
        estimated_steps: the estimated number of optimizer steps of the run, on which a schedule may have been built.
        estimated_length: the number of micro-batches of an epoch from which that is derived; None if there is none.
        estimate_was_read: whether user code has read `estimated_stepping_batches`.
        warns: whether this rank logs warnings.
    """

    configs: Sequence[SchedulerConfig]
    step_by_module: Callable[[Any, Any], None] | None
    metrics: MetricStore
    estimated_steps: int | float
    estimated_length: int | None
    estimate_was_read: bool
    warns: bool

    is_stepping: bool = field(default=False, init=False)
    """Whether a scheduler is stepping. True after a step that failed, because the schedulers then disagree."""

    def __post_init__(self) -> None:
        self._warned: set[str] = set()
        self._by_step = [config for config in self.configs if config.interval == "step"]
        self._by_epoch = [config for config in self.configs if config.interval == "epoch"]
        self.used_at: dict[str, int] = {}
        """The global step of the value with which each plateau scheduler last stepped, by its index."""
        self.has_step_schedulers = bool(self._by_step)

    def after_step(self, global_step: int) -> None:
        """Step the schedulers whose interval is an optimizer step.

        Raises:
            ConfigurationError: a schedule has ended because it was built on a wrong length.
        """
        for config in self._by_step:
            is_late = global_step > self.estimated_steps
            if is_late and self.estimate_was_read and global_step == self.estimated_steps + 1 and _is_at_zero(config):
                raise self._schedule_ended(config)
            if global_step % config.frequency == 0:
                try:
                    self._step_scheduler(config)
                except ValueError as error:  # OneCycleLR raises this error after its last step
                    if is_late:
                        raise self._schedule_ended(config) from error
                    raise

    def after_epoch(self, epochs: int) -> None:
        """Step the schedulers whose interval is an epoch, after ``epochs`` completed epochs."""
        for config in self._by_epoch:
            if epochs % config.frequency == 0:
                self._step_scheduler(config)

    def _schedule_ended(self, config: SchedulerConfig) -> ConfigurationError:
        steps, length = self.estimated_steps, self.estimated_length
        return ConfigurationError(
            f"{type(config.scheduler).__name__} ran out after {steps} steps, but there is more data.",
            f"trainer.estimated_stepping_batches was {steps}, derived from the training loader's length of {length} "
            "micro-batches per epoch, but the epoch has more.",
            "correct len(loader), limit the epoch with limit_train_batches, or choose the schedule's steps yourself.",
        )

    def _step_scheduler(self, config: SchedulerConfig) -> None:
        value = None
        if config.reduce_on_plateau and config.monitor is not None:
            value = self.metrics.agreed(config.monitor)
            if value is None:
                self._handle_missing(config, config.monitor)
                return
            index, logged_at = self.configs.index(config), self.metrics.logged_at(config.monitor)
            if logged_at is not None:
                if self.used_at.get(str(index)) == logged_at:
                    self._warn_once(
                        f"{type(config.scheduler).__name__} monitors {config.monitor!r}, which was not logged again "
                        "since the scheduler's last step. The step is skipped: set 'frequency' to how often the value "
                        "is logged."
                    )
                    return
                self.used_at[str(index)] = logged_at
        self.is_stepping = True
        if self.step_by_module is not None:
            self.step_by_module(config.scheduler, value)
        elif value is None:
            config.scheduler.step()
        else:
            config.scheduler.step(value)
        self.is_stepping = False

    def _handle_missing(self, config: SchedulerConfig, monitor: str) -> None:
        names = list(self.metrics.callback_metrics())
        problem = (
            f"{type(config.scheduler).__name__} monitors {monitor!r}, which was not logged.{nearest(monitor, names)}"
        )
        logged = f"the logged values are: {', '.join(names) or 'none'}."
        if config.strict:
            raise ConfigurationError(
                problem,
                logged,
                "log the value before the scheduler steps, let the scheduler step as often as the value is logged "
                "('frequency': 2 with check_val_every_n_epoch=2), or skip such steps with 'strict': False.",
            )
        self._warn_once(f"{problem} {logged} The step of the scheduler is skipped because of 'strict': False.")

    def _warn_once(self, text: str) -> None:
        if text not in self._warned and self.warns:
            logger.warning("%s This warning is not repeated.", text)
        self._warned.add(text)


def _is_at_zero(config: SchedulerConfig) -> bool:
    """Return whether all learning rates of the scheduler's optimizer are 0, so that optimizer steps change nothing."""
    optimizer = getattr(config.scheduler, "optimizer", None)
    return optimizer is not None and all(float(group["lr"]) == 0.0 for group in optimizer.param_groups)
