"""Warns in the first step, not only at the end of an epoch, if a monitored name is not logged."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from difflib import get_close_matches

from drivetrain._engine.assembly.run_parts import RunCore
from drivetrain._loops.hooks import overridden
from drivetrain._module.module_hooks import ModuleHooks
from drivetrain.callback import Callback, MonitorsValues
from drivetrain.errors import nearest

logger = logging.getLogger("drivetrain")

_LATE_HOOKS = ("on_train_epoch_end",)
_EVALUATION_HOOKS = ("on_validation_epoch_end", "on_validation_end")


class MonitoredKeysCheck:
    """Compares the monitored names with the names that the sanity check and the first step have logged.

    Args:
        run: the run.
    """

    def __init__(self, run: RunCore) -> None:
        self._run = run
        self._logged_names: set[str] = set()
        self._validated = False

    def note_validation(self) -> None:
        """Record the names that the sanity check has logged, before the check's values are cleared.

        A validation that logs nothing may be one that logs only outside of the sanity check.
        """
        self._logged_names = self._run.metrics.known_names()
        self._validated = bool(self._logged_names)

    def after_first_batch(self) -> None:
        """Warn about monitored names that were not logged. Called on one rank."""
        self._logged_names |= self._run.metrics.known_names()
        known = sorted(self._logged_names)
        for monitored_by, name in self._monitored():
            if name in self._logged_names:
                continue
            # A hook that has not run yet may log the name. A name that is almost a logged one is a likely typo.
            if self._may_log_later() and not get_close_matches(name, known, n=1, cutoff=0.85):
                continue
            logger.warning(
                "%s: nothing of that name was logged in %s first step.%s Logged names: %s. Unless the name is logged "
                "later, the run fails when the value is read. This warning is not repeated.",
                monitored_by,
                "the sanity check and the" if self._validated else "the",
                nearest(name, known),
                ", ".join(known) or "no values",
            )

    def _monitored(self) -> Iterator[tuple[str, str]]:
        for callback in self._run.callbacks:
            if isinstance(callback, MonitorsValues):
                for name, description in callback.monitors.items():
                    yield description, name
        for config in self._run.optimization.schedulers:
            if config.reduce_on_plateau and config.monitor is not None and config.strict:
                yield f"'monitor': {config.monitor!r} of {type(config.scheduler).__name__}", config.monitor

    def _may_log_later(self) -> bool:
        """Whether one of the user's hooks that has not run yet may log more names."""
        run = self._run
        unseen = self._run.data.validates and not self._validated
        names = (*_LATE_HOOKS, *(_EVALUATION_HOOKS if unseen else ()))
        if unseen or overridden(names, run.module, ModuleHooks):
            return True
        callbacks = [each for each in run.callbacks if not type(each).__module__.startswith("drivetrain.")]
        return any(overridden(names, callback, Callback) for callback in callbacks)
