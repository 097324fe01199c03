"""Which progress bar a run gets when the user names none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from drivetrain.callback import Callback
from drivetrain.callbacks.progress_bar import Phase, ProgressBar
from drivetrain.callbacks.rich_progress_bar import RichProgressBar, rich_is_installed

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext


class EpochLines(ProgressBar):
    """The `ProgressBar` of output that is no terminal: a line an epoch, and nothing at all in a step.

    The batch hooks are the base class's again, which the engine recognises as absent.
    """

    on_train_batch_end = Callback.on_train_batch_end
    on_validation_batch_end = Callback.on_validation_batch_end
    on_test_batch_end = Callback.on_test_batch_end
    on_predict_batch_end = Callback.on_predict_batch_end

    def on_train_epoch_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Remember where the epoch began."""
        super().on_train_epoch_start(trainer, module)
        self._first_micro_batch = trainer.micro_batches

    def is_terminal(self) -> bool:
        """False: nothing is ever rewritten."""
        return False

    def _conclude(self, trainer: RunContext, phase: Phase | None) -> None:
        # Nobody counted: training has a counter of the engine's, an evaluation ran all it has.
        if phase is not None:
            training = phase is self._training
            phase.done = phase.counted = (
                trainer.micro_batches - self._first_micro_batch if training else phase.total or 0
            )
        super()._conclude(trainer, phase)


def default_progress_bar() -> ProgressBar:
    """Return the bar that suits this process's standard output.

    `RichProgressBar` on a terminal where rich is installed, else the plain `ProgressBar`; one that prints a line an
    epoch where the output is no terminal.
    """
    if not sys.stdout.isatty():
        return EpochLines()
    return RichProgressBar() if rich_is_installed() else ProgressBar()
