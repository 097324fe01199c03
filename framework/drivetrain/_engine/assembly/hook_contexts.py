"""Runs the user's hooks in the contexts of a strategy that keeps gradients or weights apart from the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drivetrain._loops.hooks import HOOKS, HookTable, is_users_hook

_WITHOUT_CONTEXT = ("setup", "teardown", "on_exception", "on_save_checkpoint", "on_load_checkpoint")


def call_in_contexts(table: HookTable, trainer: Any) -> None:
    """Wrap the user's hooks in `Strategy.hook_context`.

    Args:
        table: the hooks.
        trainer: the `Fit`.
    """
    table.wrap(
        (name for name in HOOKS if name not in _WITHOUT_CONTEXT),
        lambda name, _, call: _InContext(call, trainer, name) if is_users_hook(call) else call,
    )


class _InContext:
    """Calls a hook in the context that the strategy defines for it."""

    def __init__(self, call: Callable[..., Any], trainer: Any, name: str) -> None:
        self._call = call
        self.func = getattr(call, "func", call)  # the name by which a profiler finds the hook's owner
        self._trainer = trainer
        self._name = name

    def __call__(self, *arguments: Any) -> Any:
        trainer = self._trainer
        run = trainer.run_state
        complete = self._name != "on_after_backward" or (run.module.automatic_optimization and run.position.closes)
        with trainer.strategy.hook_context(self._name, complete):
            return self._call(*arguments)
