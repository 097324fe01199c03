"""GarbageCollection: runs Python's garbage collector between steps, after the same steps on every rank."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from drivetrain._config.argument_checks import check_count
from drivetrain.callback import Callback

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext

_YOUNG_GENERATION = 1
"""Argument of `gc.collect` that skips the oldest objects, so that a collection takes less than a millisecond."""


class GarbageCollection(Callback):
    """Collects garbage every ``every_n_steps`` steps instead of at arbitrary moments, so that all ranks pause together.

    Python's automatic collection starts at a different moment on each rank. When the ranks exchange gradients, they
    wait for the rank that pauses. This callback disables automatic collection during training, and collects young
    objects every ``every_n_steps`` steps and all objects at the end of an epoch. The callback helps if the data
    pipeline or `training_step` creates many Python objects and there are many ranks. The engine itself creates few
    objects, as described in ``docs/decisions/``.

    After the run, also after a failure, automatic collection is enabled again if it was enabled before the run.

    Args:
        every_n_steps: optimizer steps between two collections.

    Raises:
        ConfigurationError: ``every_n_steps`` is not a whole number of at least 1.
    """

    priority = -200  # after callbacks that draw and save

    def __init__(self, every_n_steps: int = 1000) -> None:
        meaning = "the number of optimizer steps between two collections"
        check_count("GarbageCollection", "every_n_steps", every_n_steps, 1, meaning)
        self.every_n_steps = every_n_steps
        self._has_disabled = False  # whether this callback has disabled automatic collection
        self._collected_at = 0  # global_step of the last collection

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Collect the garbage of the set-up, and disable automatic collection."""
        self._collected_at = trainer.global_step
        self._has_disabled = gc.isenabled()
        gc.collect()
        gc.disable()

    def on_train_batch_end(self, trainer: RunContext, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Collect young objects if ``every_n_steps`` is reached."""
        step = trainer.global_step
        if step - self._collected_at >= self.every_n_steps:
            self._collected_at = step
            gc.collect(_YOUNG_GENERATION)

    def on_train_epoch_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Collect all objects."""
        gc.collect()

    def on_train_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Enable automatic collection again."""
        self._restore_collector()

    def teardown(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Enable automatic collection again after a failure."""
        self._restore_collector()

    def _restore_collector(self) -> None:
        if self._has_disabled:
            gc.enable()
        self._has_disabled = False
