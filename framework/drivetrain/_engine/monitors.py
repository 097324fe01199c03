"""Warns in the first step, not only at the end of an epoch, if a monitored name is not logged."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from types import CodeType, FunctionType
from typing import Any

from drivetrain._engine.run_parts import RunCore, RunData
from drivetrain._loops.configured_optimizers import SchedulerConfig
from drivetrain._loops.hooks import is_overridden
from drivetrain.callback import Callback
from drivetrain.errors import nearest
from drivetrain.module._module_hooks import ModuleHooks

logger = logging.getLogger("drivetrain")

_CONFIGURING_METHODS = ("__init__", "monitors", "configure_optimizers", "configure_callbacks")
_LATE_HOOKS = ("on_train_epoch_end",)
_EVALUATION_HOOKS = ("on_validation_epoch_end", "on_validation_end")
_SEPARATORS = "_-/. "
"""Characters between the parts of a composed name, as in ``f"{stage}_loss"``."""


class MonitorCheck:
    """Compares the monitored names with the names that the sanity check and the first step have logged.

    Args:
        run: the run.
        data: the data of the run.
        schedulers: the learning rate schedulers of the run.
    """

    def __init__(self, run: RunCore, data: RunData, schedulers: Sequence[SchedulerConfig]) -> None:
        self._run = run
        self._data = data
        self._schedulers = schedulers
        self._logged_names: set[str] = set()
        self._validated = False

    def note_validation(self) -> None:
        """Record the names that the sanity check has logged, before the check's values are cleared."""
        self._validated = True
        self._logged_names = self._run.metrics.known_names()

    def after_first_batch(self) -> None:
        """Warn about monitored names that were not logged. Called on one rank."""
        self._logged_names |= self._run.metrics.known_names()
        known = sorted(self._logged_names)
        for monitored_by, name in self._monitored():
            if name in self._logged_names or self._is_in_user_code(name):
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
            for name, description in callback.monitors.items():
                yield description, name
        for config in self._schedulers:
            if config.reduce_on_plateau and config.monitor is not None and config.strict:
                yield f"'monitor': {config.monitor!r} of {type(config.scheduler).__name__}", config.monitor

    def _may_log_later(self) -> bool:
        """Whether one of the user's hooks that has not run yet may log more names."""
        run = self._run
        unseen = self._data.validates and not self._validated
        names = (*_LATE_HOOKS, *(_EVALUATION_HOOKS if unseen else ()))
        if unseen or any(is_overridden(name, run.module, ModuleHooks) for name in names):
            return True
        callbacks = [each for each in run.callbacks if not type(each).__module__.startswith("drivetrain.")]
        return any(is_overridden(name, callback, Callback) for callback in callbacks for name in names)

    def _is_in_user_code(self, name: str) -> bool:
        """Whether the user's code contains the name, which may be logged in another step or under a condition."""
        for owner in (self._run.module, *self._run.callbacks):
            for kind in type(owner).__mro__:
                if kind.__module__.startswith(("drivetrain.", "torch.", "builtins")):
                    continue
                for method, value in vars(kind).items():
                    function = getattr(value, "fget", getattr(value, "__func__", value))
                    if method in _CONFIGURING_METHODS:
                        continue
                    if isinstance(function, FunctionType) and _contains(function.__code__, name):
                        return True
                module_members = vars(sys.modules.get(kind.__module__, object)).values()
                if any(isinstance(member, FunctionType) and _logs(member.__code__, name) for member in module_members):
                    return True
        return False


def _logs(code: CodeType, name: str) -> bool:
    """Whether a function contains ``name`` and logs values. A function that builds callbacks may contain names too."""
    return not {"log", "log_dict"}.isdisjoint(code.co_names) and _contains(code, name)


def _contains(code: CodeType, name: str) -> bool:
    return any(
        _contains(constant, name) if isinstance(constant, CodeType) else _matches(constant, name)
        for constant in code.co_consts
    )


def _matches(constant: Any, name: str) -> bool:
    if isinstance(constant, tuple):
        return name in constant
    if constant == name:
        return True
    if not isinstance(constant, str) or len(constant) < 3:
        return False
    is_suffix = constant[0] in _SEPARATORS and name.endswith(constant)
    return is_suffix or (constant[-1] in _SEPARATORS and name.startswith(constant))
