"""How a run ends: its reason, the entry in the run's record and the closing message."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

from drivetrain._engine.assembly.run_core import RunCore
from drivetrain.run_context import RunContext

logger = logging.getLogger("drivetrain")

_LONGEST_LINE = 200  # characters of an error in the closing message

_LONGEST_REASON = 2000  # characters of an error in the run's record


class RunEnding:
    """Collects why a run ended, and reports it.

    Args:
        run: the run.
    """

    def __init__(self, run: RunCore) -> None:
        self._run = run
        self._began = time.monotonic()
        self._message_reason: str | None = None  # None leaves out the closing message
        self._recorded_reason = ""
        self.has_trained = False
        """Whether training has begun, so that the closing message reports a failure too."""
        self.exit_error: BaseException | None = None
        """The error to raise at the end of a run that a signal cut short."""

    def set_reasons(self, reasons: Sequence[str]) -> None:
        """Set why training ended, first limits and then requests."""
        self._recorded_reason = self._message_reason = "; ".join(reasons) or "there was nothing to train"

    def set_failure(self, error: BaseException) -> None:
        """Set the error that ended the run."""
        self._recorded_reason = _described(error)
        self._message_reason = self._recorded_reason.partition("\n")[0][:_LONGEST_LINE] if self.has_trained else None

    def record(self, status: str) -> None:
        """Finish the loggers and write the end into the run's record. Called on rank 0 only.

        Args:
            status: "success", "interrupted" or "failed".

        Raises:
            Exception: a logger failed; the run is recorded as failed.
        """
        run, problem = self._run, None
        if run.trainer.loggers:
            with run.span("logging"):
                problem = _finalize_loggers(run.trainer, status)
        if problem is not None:
            status, self._recorded_reason = "failed", _described(problem)
        status, step = {"success": "finished"}.get(status, status), run.progress.global_step
        run.folder.notes.end(status, self._recorded_reason, step)
        if problem is not None:
            raise problem

    def log(self, written: str | None) -> None:
        """Log the closing message on rank 0: why training ended, how long it took and which files the run has.

        Args:
            written: the path of the last checkpoint that was written; None for none.
        """
        run = self._run
        if self._message_reason is None or run.strategy.rank > 0:
            return
        epoch, step = run.progress.epoch, run.progress.global_step
        epochs, steps = f"{epoch} epoch{'' if epoch == 1 else 's'}", f"{step} optimizer step{'' if step == 1 else 's'}"
        duration = timedelta(seconds=round(time.monotonic() - self._began))
        lines = [f"The run ended: {self._message_reason} ({epochs}, {steps}) after {duration}."]
        if run.trainer.settings["enable_progress_bar"].value and not run.trainer.barebones:
            from drivetrain._engine.run_summary import output_summary

            lines += output_summary(run, written)
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
