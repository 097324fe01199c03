"""GradientAccumulationScheduler: windows whose length changes as training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivetrain.callback import Callback
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext


class GradientAccumulationScheduler(Callback):
    """Sets ``accumulate_grad_batches`` by epoch.

    ``GradientAccumulationScheduler({0: 8, 4: 4, 8: 1})`` makes a window of 8 micro-batches in epochs 0 to 3, of 4 in
    epochs 4 to 7, and steps on every micro-batch from epoch 8 on. Before the first epoch named, a window is one
    micro-batch.

    Args:
        scheduling: micro-batches a window, by the epoch (counted from 0) from which it holds.

    Raises:
        ConfigurationError: an epoch below 0 or a window below 1; at the run's start, also
            ``Fit(accumulate_grad_batches=...)`` above 1 or a module with manual optimization.
    """

    priority = 100  # the window's length must stand before anybody asks for it

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not scheduling:
            raise ConfigurationError(
                "GradientAccumulationScheduler({}) schedules nothing",
                "it needs at least one epoch with a window's length",
                "give {epoch: micro_batches}, such as {0: 8, 4: 1}",
            )
        for epoch, window in scheduling.items():
            if not _is_count(epoch, 0) or not _is_count(window, 1):
                raise ConfigurationError(
                    f"GradientAccumulationScheduler({{{epoch!r}: {window!r}}})",
                    "epochs are whole numbers from 0, and a window has at least one micro-batch",
                    "give {epoch: micro_batches}, such as {0: 8, 4: 1}",
                )
        self.scheduling = dict(sorted(scheduling.items()))
        self._before: int | None = None

    @property
    def state_key(self) -> str:
        """The class and the schedule."""
        return f"{type(self).__qualname__}{self.scheduling!r}"

    def window(self, epoch: int) -> int:
        """How many micro-batches a window has in ``epoch``."""
        return next((self.scheduling[start] for start in reversed(self.scheduling) if start <= epoch), 1)

    def window_of(self, epoch: int) -> int:
        """What `window` says."""
        return self.window(epoch)

    def setup(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Refuse what contradicts the schedule, and set the first window."""
        if stage != "fit":
            return
        if trainer.accumulate_grad_batches != 1:
            raise ConfigurationError(
                f"Fit(accumulate_grad_batches={trainer.accumulate_grad_batches!r}) together with "
                f"GradientAccumulationScheduler({self.scheduling!r})",
                "both say how long a window is",
                f"drop one of them; {{0: {trainer.accumulate_grad_batches!r}}} in the schedule is the same",
            )
        if not module.automatic_optimization:
            raise ConfigurationError(
                f"GradientAccumulationScheduler({self.scheduling!r}) with manual optimization",
                "there the module decides when to step",
                "count micro-batches in training_step, or use automatic optimization",
            )
        self._before = trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = self.window(trainer.current_epoch)

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Set the window of an epoch that is resumed in its middle and has no start of its own."""
        trainer.accumulate_grad_batches = self.window(trainer.current_epoch)

    def on_train_epoch_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Set the epoch's window."""
        trainer.accumulate_grad_batches = self.window(trainer.current_epoch)

    def teardown(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Leave the run's setting as it was."""
        if self._before is not None:
            trainer.accumulate_grad_batches = self._before
            self._before = None


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
