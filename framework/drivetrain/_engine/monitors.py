"""Names that callbacks and schedulers go by, told when nothing logs them: in the first step, not after an epoch."""

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

_WHERE_IT_IS_MONITORED = ("__init__", "monitors", "configure_optimizers", "configure_callbacks")
_LATE_HOOKS = ("on_train_epoch_end",)
_EVALUATION_HOOKS = ("on_validation_epoch_end", "on_validation_end")
_JOINTS = "_-/. "
"""Where names are put together, as in ``f"{stage}_loss"``."""


class Monitors:
    """Compares what is monitored with what the sanity check and the first step have logged.

    Args:
        run: the run.
        data: its data.
        schedulers: those of its optimizers.
    """

    def __init__(self, run: RunCore, data: RunData, schedulers: Sequence[SchedulerConfig]) -> None:
        self._run = run
        self._data = data
        self._schedulers = schedulers
        self._known: set[str] = set()
        self._validated = False

    def note_validation(self) -> None:
        """Take in what the sanity check has logged, before it is forgotten."""
        self._validated = True
        self._known = self._run.metrics.known_names()

    def after_first_batch(self) -> None:
        """Say what is monitored and was logged by nobody. On one rank."""
        self._known |= self._run.metrics.known_names()
        known = sorted(self._known)
        for who, name in self._monitored():
            if name in self._known or self._is_written_somewhere(name):
                continue
            # Where a hook that is yet to come may log it, only a slip of the pen is worth a word.
            if self._is_to_come() and not get_close_matches(name, known, n=1, cutoff=0.85):
                continue
            logger.warning(
                "%s: nothing of that name was logged in %s first step.%s Logged were: %s. Unless something logs it by "
                "then, the run ends with an error where it is read. Said once.",
                who,
                "the sanity check and the" if self._validated else "the",
                nearest(name, known),
                ", ".join(known) or "no values",
            )

    def _monitored(self) -> Iterator[tuple[str, str]]:
        for callback in self._run.callbacks:
            for name, who in callback.monitors.items():
                yield who, name
        for config in self._schedulers:
            if config.plateau and config.monitor is not None and config.strict:
                yield f"'monitor': {config.monitor!r} of {type(config.scheduler).__name__}", config.monitor

    def _is_to_come(self) -> bool:
        """Whether a hook of the user's that has not run yet may log more."""
        run = self._run
        unseen = self._data.validates and not self._validated
        names = (*_LATE_HOOKS, *(_EVALUATION_HOOKS if unseen else ()))
        hooked = any(is_overridden(name, run.module, ModuleHooks) for name in names)
        own = [one for one in run.callbacks if not type(one).__module__.startswith("drivetrain.")]
        return unseen or hooked or any(is_overridden(name, one, Callback) for one in own for name in names)

    def _is_written_somewhere(self, name: str) -> bool:
        """Whether the user's code holds the name: it may be logged in another step, or under a condition."""
        for owner in (self._run.module, *self._run.callbacks):
            for kind in type(owner).__mro__:
                if kind.__module__.startswith(("drivetrain.", "torch.", "builtins")):
                    continue
                for method, value in vars(kind).items():
                    function = getattr(value, "fget", getattr(value, "__func__", value))
                    if method in _WHERE_IT_IS_MONITORED:
                        continue
                    if isinstance(function, FunctionType) and _holds(function.__code__, name):
                        return True
                beside = vars(sys.modules.get(kind.__module__, object)).values()
                if any(isinstance(one, FunctionType) and _logs(one.__code__, name) for one in beside):
                    return True
        return False


def _logs(code: CodeType, name: str) -> bool:
    """Whether a function that the module may call logs it; one that only builds the callbacks holds it as well."""
    return not {"log", "log_dict"}.isdisjoint(code.co_names) and _holds(code, name)


def _holds(code: CodeType, name: str) -> bool:
    return any(
        _holds(constant, name) if isinstance(constant, CodeType) else _is_or_has(constant, name)
        for constant in code.co_consts
    )


def _is_or_has(constant: Any, name: str) -> bool:
    if isinstance(constant, tuple):
        return name in constant
    if constant == name:
        return True
    if not isinstance(constant, str) or len(constant) < 3:
        return False
    ends = constant[0] in _JOINTS and name.endswith(constant)
    return ends or (constant[-1] in _JOINTS and name.startswith(constant))
