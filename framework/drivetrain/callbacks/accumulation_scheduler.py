"""GradientAccumulationScheduler: changes the accumulation window during training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivetrain._config.argument_checks import check_types
from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext


class GradientAccumulationScheduler(Callback):
    """Sets ``accumulate_grad_batches`` by epoch.

    ``GradientAccumulationScheduler({0: 8, 4: 4, 8: 1})`` accumulates 8 micro-batches per step in epochs 0 to 3 and 4 in
    epochs 4 to 7, and steps after every micro-batch from epoch 8 on. Epochs before the first key do not accumulate.

    Args:
        scheduling: micro-batches per window, by the first epoch (counted from 0) to which the number applies.

    Raises:
        ConfigurationError: an epoch is below 0 or a window below 1; at the start of the run, also if
            ``Fit(accumulate_grad_batches=...)`` is not 1 or the module uses manual optimization.
    """

    priority = 100  # before callbacks that read the window

    _key_arguments = ("scheduling",)

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        check_types(GradientAccumulationScheduler, locals())
        if not scheduling or not all(_is_count(epoch, 0) and _is_count(scheduling[epoch], 1) for epoch in scheduling):
            raise ConfigurationError(
                f"GradientAccumulationScheduler({scheduling!r})",
                "it needs an epoch, counted from 0, and each window has at least one micro-batch",
                "give {epoch: micro_batches}, such as {0: 8, 4: 1}",
            )
        self.scheduling = dict(sorted(scheduling.items()))
        self._original_window: int | None = None  # ``accumulate_grad_batches`` before the run

    def micro_batches_per_window(self, epoch: int) -> int:
        """Return the number of micro-batches per window in ``epoch``."""
        return next((self.scheduling[start] for start in reversed(self.scheduling) if start <= epoch), 1)

    def setup(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Check that no other setting contradicts the schedule, and set the first window."""
        if stage != "fit":
            return
        if trainer.accumulate_grad_batches != 1:
            raise ConfigurationError(
                f"Fit(accumulate_grad_batches={trainer.accumulate_grad_batches!r}) together with "
                f"GradientAccumulationScheduler({self.scheduling!r})",
                "both set the number of micro-batches per step",
                f"remove one of them; the schedule {{0: {trainer.accumulate_grad_batches!r}}} is equivalent",
            )
        if not module.automatic_optimization:
            raise ConfigurationError(
                f"GradientAccumulationScheduler({self.scheduling!r}) with manual optimization",
                "in manual optimization the module determines when the optimizers step",
                "count micro-batches in training_step, or use automatic optimization",
            )
        self._original_window = trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = self.micro_batches_per_window(trainer.current_epoch)

    def on_train_epoch_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Set the epoch's window."""
        trainer.accumulate_grad_batches = self.micro_batches_per_window(trainer.current_epoch)

    on_train_start = on_train_epoch_start  # for an epoch that is resumed midway

    def teardown(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Restore ``accumulate_grad_batches`` to its value before the run."""
        if self._original_window is not None:
            trainer.accumulate_grad_batches = self._original_window
            self._original_window = None


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
