"""The callbacks of a run: the trainer's and the module's, and the hooks that they override."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain._engine.assembly.defaults import checked_callbacks
from drivetrain._loops.hooks import HOOKS, HookTable, is_users_hook
from drivetrain._run_state import with_module_callbacks
from drivetrain.callback import Callback, ReportsProgress, bind_logging
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule
from drivetrain.run_context import RunContext

if TYPE_CHECKING:
    from drivetrain._engine.ranks.common_draws import EarlyDraws

_WITHOUT_CONTEXT = ("setup", "teardown", "on_exception", "on_save_checkpoint", "on_load_checkpoint")
"""The hooks that are called outside of `Strategy.hook_context`."""


class RunCallbacks(list[Callback]):
    """The callbacks in the order in which they are called. `collect` looks up which hooks they and the module override.

    Args:
        trainer: the `Fit`, whose ``callbacks`` are used.
        module: the user's module.
    """

    hooks: HookTable
    """The overridden hooks, once the callbacks are collected."""

    def __init__(self, trainer: RunContext, module: TrainModule) -> None:
        super().__init__()
        self._trainer = trainer
        self._module = module
        self._from_trainer: list[Callback] = []  # trainer.callbacks at the last `collect`
        self._from_module: list[Callback] = []
        self.early_draws: EarlyDraws | None = None
        """The random numbers of the user's hooks before the first batch, if they are those of a single process."""
        self.collected = False
        """Whether `collect` was called; False in a process that only launched the processes of the run."""

    def configure(self) -> list[Callback]:
        """Return the callbacks that the module's ``configure_callbacks`` returns. `collect` adds them."""
        self._from_module = checked_callbacks(self._module.configure_callbacks(), "configure_callbacks returned")
        return self._from_module

    def collect(self) -> None:
        """Collect the trainer's current callbacks and the module's, and look up the hooks."""
        self._from_trainer = checked_callbacks(self._trainer.callbacks, "trainer.callbacks holds")
        self[:] = with_module_callbacks(self._from_trainer, self._from_module)
        self.hooks, self.collected = HookTable(self._trainer, self._module, self), True
        if self._trainer.world_size > 1:
            from drivetrain._engine.ranks.common_draws import draw_in_common

            draw_in_common(self.hooks, self._trainer)
        if self._trainer.strategy.has_hook_contexts:
            self.hooks.wrap(
                (name for name in HOOKS if name not in _WITHOUT_CONTEXT),
                lambda name, _, call: _InContext(call, self._trainer, name) if is_users_hook(call) else call,
            )
        for callback in self:
            bind_logging(callback, self._module)

    def set_up_appended(self, stage: str, after_collect: Callable[[], None]) -> None:
        """Set up the callbacks that ``setup`` hooks appended to ``trainer.callbacks``, and drop the removed ones.

        Args:
            stage: the stage, which is passed to ``setup``.
            after_collect: called before each round of ``setup``.
        """
        while appended := self._appended():
            self.collect()
            after_collect()
            for callback in appended:
                callback.setup(self._trainer, self._module, stage)
        if len(self._trainer.callbacks) < len(self._from_trainer):  # some were removed
            self.collect()

    def refuse_appended(self) -> None:
        """Check that no callback was appended after set-up.

        Raises:
            ConfigurationError: a callback was appended after set-up.
        """
        appended = self._appended()
        if appended:
            raise ConfigurationError(
                f"{type(appended[0]).__name__} was appended to trainer.callbacks after the set-up.",
                "overridden hooks are looked up once, before training, so the callback's hooks would never be called.",
                "append the callback in setup, return it from configure_callbacks, or pass it as Fit(callbacks=...).",
            )

    def detach(self) -> None:
        """Disconnect the callbacks from the module's logging."""
        for callback in self:
            bind_logging(callback, None)

    def progress_writers(self) -> list[Callable[[int], None]]:
        """Return the functions to which loops report the number of micro-batches that are done; [] for none."""
        if self._trainer.log_every_n_steps <= 0:
            return []
        listeners = [callback for callback in self if isinstance(callback, ReportsProgress)]
        return [partial(callback.write_progress, self._trainer, self._module) for callback in listeners]

    def _appended(self) -> list[Callback]:
        known = {id(callback) for callback in self._from_trainer}
        return [callback for callback in self._trainer.callbacks if id(callback) not in known]


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
        complete = self._name != "on_after_backward" or (run.module.automatic_optimization and run.current.closes)
        with trainer.strategy.hook_context(self._name, complete):
            return self._call(*arguments)
