"""How a run ends: its reason, the entry in the run's record and the closing message."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from drivetrain._engine.assembly.run_core import RunCore
from drivetrain._run_state import Progress
from drivetrain.run_context import RunContext

logger = logging.getLogger("drivetrain")

_LONGEST_LINE = 200  # characters of an error in the closing message

_LONGEST_REASON = 2000  # characters of an error in the run's record


class RunEnding:
    """Collects why a run ended, and reports it.

    Args:
        core: the run.
    """

    def __init__(self, core: RunCore) -> None:
        self._core = core
        self._began = time.monotonic()
        self._message_reasons: list[str] | None = None  # None leaves out the closing message
        self._was_already_finished = False
        self._recorded_reason = ""
        self.has_trained = False
        """Whether training has begun, so that the closing message reports a failure too."""
        self.exit_error: BaseException | None = None
        """The error to raise at the end of a run that a signal cut short."""

    def set_reasons(self, reasons: Sequence[str], nothing_left: bool = False) -> None:
        """Set why training ended.

        Args:
            reasons: one or several sentences.
            nothing_left: whether the resumed run had already finished.
        """
        self._message_reasons, self._was_already_finished = list(reasons), nothing_left
        self._recorded_reason = "; ".join(reasons)

    def set_failure(self, error: BaseException) -> None:
        """Set the error that ended the run."""
        self._recorded_reason = _described(error)
        self._message_reasons = [self._recorded_reason.partition("\n")[0][:_LONGEST_LINE]] if self.has_trained else None
        self._was_already_finished = False

    def record(self, status: str) -> None:
        """Finish the loggers and write the end into the run's record. Called on rank 0 only.

        Args:
            status: "success", "interrupted" or "failed".

        Raises:
            Exception: a logger failed; the run is recorded as failed.
        """
        core, problem = self._core, None
        if core.trainer.loggers:
            with core.span("logging"):
                problem = _finalize_loggers(core.trainer, status)
        if problem is not None:
            status, self._recorded_reason = "failed", _described(problem)
        status, step = {"success": "finished"}.get(status, status), core.progress.global_step
        core.folder.notes.end(status, self._recorded_reason, step)
        if problem is not None:
            raise problem

    def log(self, written: str | None) -> None:
        """Log the closing message on rank 0: why training ended, how long it took and which files the run has.

        Args:
            written: the path of the last checkpoint that was written; None for none.
        """
        core = self._core
        if self._message_reasons is None or core.strategy.rank > 0:
            return
        seconds = time.monotonic() - self._began
        lines = [_closing_sentence(self._message_reasons, core.progress, self._was_already_finished, seconds)]
        if core.trainer.settings["enable_progress_bar"].value and not core.trainer.barebones:
            from drivetrain._engine.run_summary import output_summary

            lines += output_summary(core, written)
        logger.info("\n".join(lines))


def _finalize_loggers(trainer: RunContext, status: str) -> Exception | None:
    """Deliver all rows to the loggers, and finalize all of them; return the first error, of a logger or a device."""
    first_error: Exception | None = None
    finalize: list[Callable[[], object]] = [partial(each.finalize, status) for each in trainer.loggers]
    for finish in (trainer.finish_logging, *finalize):
        try:
            finish()
        except Exception as error:
            first_error = first_error or error
    return first_error


def _described(error: BaseException) -> str:
    text = str(error)  # empty for Ctrl-C and plain asserts
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__)[:_LONGEST_REASON]


def _closing_sentence(reasons: list[str], progress: Progress, nothing_left: bool, seconds: float) -> str:
    """Return the line that is logged at the end of a run.

    Args:
        reasons: the reasons why the run ended, first limits and then requests.
        progress: the counters of the run.
        nothing_left: whether the run resumed a finished run and made no step.
        seconds: the run's duration.
    """
    epochs = f"{progress.epoch} epoch{'' if progress.epoch == 1 else 's'}"
    steps = f"{progress.global_step} optimizer step{'' if progress.global_step == 1 else 's'}"
    ending = "; nothing was left to train" if nothing_left else f" after {_duration(seconds)}"
    return f"The run ended: {'; '.join(reasons) or 'there was nothing to train'} ({epochs}, {steps}){ending}."


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"
