"""GarbageCollection: Python's cyclic collector runs between steps, at the same ones on every rank."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext

_YOUNG = 1  # the generation below the oldest: what came since the last collection, in some tenths of a millisecond


class GarbageCollection(Callback):
    """Collects garbage every so many steps and not in between, so that the ranks pause together.

    By itself Python collects when enough objects were made, which each rank's are at another moment: in a step that
    exchanges gradients all of them wait for the one that pauses. Young objects are collected every ``every_n_steps``
    steps, all of them at the end of an epoch. It is worth it where data or steps make many Python objects on many
    ranks; a step of ours makes few, see the record in ``docs/decisions/``.

    Whether the collector was on before is how it is left after the run, also after a failure.

    Args:
        every_n_steps: optimizer steps between two collections.

    Raises:
        ConfigurationError: ``every_n_steps`` is no number of steps.
    """

    priority = -200  # behind those that draw and save

    def __init__(self, every_n_steps: int = 1000) -> None:
        if every_n_steps != int(every_n_steps) or every_n_steps < 1:
            raise ConfigurationError(
                f"GarbageCollection(every_n_steps={every_n_steps!r}).",
                "it counts the optimizer steps between two collections",
                "give at least 1, such as 1000",
            )
        self.every_n_steps = every_n_steps
        self._holds = False  # it was on, and we have switched it off
        self._collected_at = 0

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Collect what set-up has left, and switch the collector off."""
        self._collected_at = trainer.global_step
        self._holds = gc.isenabled()
        gc.collect()
        gc.disable()

    def on_train_batch_end(
        self, trainer: RunContext, module: TrainModule, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """Collect when it is time."""
        step = trainer.global_step
        if step - self._collected_at >= self.every_n_steps:
            self._collected_at = step
            gc.collect(_YOUNG)

    def on_train_epoch_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Collect everything: the ranks meet here anyway."""
        gc.collect()

    def on_train_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Leave the collector as it was."""
        self._let_go()

    def teardown(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """The same after a failure."""
        self._let_go()

    def _let_go(self) -> None:
        if self._holds:
            gc.enable()
        self._holds = False
