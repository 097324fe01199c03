"""Chooses the progress bar of a run if the user passes none."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from drivetrain._runtime.lazy_names import is_installed
from drivetrain._runtime.terminal_output import is_terminal
from drivetrain.callback import Callback
from drivetrain.callbacks._bar_line import Phase
from drivetrain.callbacks.progress_bar import ProgressBar
from drivetrain.callbacks.rich_progress_bar import RichProgressBar

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext


class ProgressLines(ProgressBar):
    """A `ProgressBar` that prints occasional lines to output that is not a terminal, and does no work in a step.

    The batch hooks of this class are those of `Callback`, which the engine does not call.
    """

    on_train_batch_end = Callback.on_train_batch_end  # type: ignore[assignment]  # ProgressBar has one for all stages
    on_validation_batch_end = Callback.on_validation_batch_end
    on_test_batch_end = Callback.on_test_batch_end
    on_predict_batch_end = Callback.on_predict_batch_end

    def is_terminal(self) -> bool:
        """Return False, so that lines are printed and never redrawn."""
        return False

    def _end_phase(self, trainer: RunContext, phase: Phase | None) -> None:
        # The batch hooks do not count micro-batches. The engine counts those of training, and an evaluation that has
        # ended has processed all of its micro-batches.
        if phase is not None:
            total = 0 if math.isinf(phase.total) else int(phase.total)
            phase.done = trainer.batch_idx if phase is self._training else total
        super()._end_phase(trainer, phase)


def default_progress_bar() -> ProgressBar:
    """Return the progress bar that suits this process's standard output.

    On a UTF terminal with rich installed the result is a `RichProgressBar`, on other terminals a plain `ProgressBar`,
    and elsewhere a bar that only prints lines.
    """
    if not is_terminal(sys.stdout):
        return ProgressLines()
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return RichProgressBar() if encoding.lower().startswith("utf") and is_installed("rich") else ProgressBar()
