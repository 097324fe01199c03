"""Warns after the first step, not only at the end of an epoch, if a monitored name is not logged."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from difflib import get_close_matches

from drivetrain._engine.assembly.run_core import RunCore
from drivetrain._loops.hooks import overridden
from drivetrain._module.module_hooks import ModuleHooks
from drivetrain.callback import Callback, MonitorsValues
from drivetrain.errors import nearest

logger = logging.getLogger("drivetrain")


def warn_of_unlogged_monitors(run: RunCore) -> None:
    """Compare the monitored names with the names that the sanity check and the first step have logged.

    A sanity check that logs nothing may be that of a validation that logs only outside of it.
    """
    logged_names = run.sanity_names | run.metrics.known_names()
    unseen = run.data.validates and not run.sanity_names
    known, may_log_later = sorted(logged_names), unseen or _logs_late(run)
    for name, monitored_by in _monitored(run):
        if name in logged_names:
            continue
        # A hook that has not run yet may log the name. A name that is almost a logged one is a likely typo.
        if may_log_later and not get_close_matches(name, known, n=1, cutoff=0.85):
            continue
        logger.warning(
            "%s: nothing of that name was logged in %s first step.%s Logged names: %s. Unless the name is logged "
            "later, the run fails when the value is read. This warning is not repeated.",
            monitored_by,
            "the sanity check and the" if run.sanity_names else "the",
            nearest(name, known),
            ", ".join(known) or "no values",
        )


def _monitored(run: RunCore) -> Iterator[tuple[str, str]]:
    """Yield each monitored name, and what monitors it."""
    for callback in run.callbacks:
        if isinstance(callback, MonitorsValues):
            yield from callback.monitors.items()
    for config in run.optimization.schedulers:
        if config.reduce_on_plateau and config.monitor is not None and config.strict:
            yield config.monitor, f"'monitor': {config.monitor!r} of {type(config.scheduler).__name__}"


def _logs_late(run: RunCore) -> bool:
    """Return whether one of the user's hooks at an epoch's end may log more names."""
    users = [each for each in run.callbacks if not type(each).__module__.startswith("drivetrain.")]
    late = ("on_train_epoch_end",)
    return bool(overridden(late, run.module, ModuleHooks)) or any(overridden(late, each, Callback) for each in users)
