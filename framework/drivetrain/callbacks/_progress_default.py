"""Which progress bar a run gets when the user names none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from drivetrain._runtime.terminal_output import is_terminal
from drivetrain.callback import Callback
from drivetrain.callbacks._bar_line import Phase
from drivetrain.callbacks.progress_bar import ProgressBar
from drivetrain.callbacks.rich_progress_bar import RichProgressBar, rich_is_installed

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext


class EpochLines(ProgressBar):
    """The `ProgressBar` of output that is no terminal: lines at a pace, and nothing at all in a step.

    The batch hooks are the base class's again, which the engine recognises as absent.
    """

    on_train_batch_end = Callback.on_train_batch_end
    on_validation_batch_end = Callback.on_validation_batch_end
    on_test_batch_end = Callback.on_test_batch_end
    on_predict_batch_end = Callback.on_predict_batch_end

    def is_terminal(self) -> bool:
        """False: nothing is ever rewritten."""
        return False

    def _conclude(self, trainer: RunContext, phase: Phase | None) -> None:
        # Nobody counted: training has a counter of the engine's, an evaluation ran all it has.
        if phase is not None:
            phase.done = trainer.batch_idx if phase is self._training else phase.total or 0
        super()._conclude(trainer, phase)


def default_progress_bar() -> ProgressBar:
    """Return the bar that suits this process's standard output.

    `RichProgressBar` on a terminal that has its signs, where rich is installed, else the plain `ProgressBar`; one that
    prints lines and rewrites none where the output is no terminal.
    """
    if not is_terminal(sys.stdout):
        return EpochLines()
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return RichProgressBar() if encoding.lower().startswith("utf") and rich_is_installed() else ProgressBar()
