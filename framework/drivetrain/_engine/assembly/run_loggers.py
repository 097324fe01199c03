"""Prepares a run's loggers, and finalizes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.loggers import Logger
from drivetrain.run_context import RunContext


def prepare_loggers(loggers: Sequence[Logger], step: int | None, hyper_parameters: Mapping[str, Any]) -> None:
    """Rewind the loggers to the step that the run resumes from, and log the hyper-parameters. Call it on rank 0 only.

    Args:
        loggers: the run's loggers.
        step: the optimizer step that the run resumes from, -1 for the run's beginning; None if the run's folder is new.
        hyper_parameters: the hyper-parameters, without secrets.
    """
    for each in loggers:
        if step is not None:
            each.rewind(step)
        if hyper_parameters:
            each.log_hyperparams(hyper_parameters)


def finalize_loggers(trainer: RunContext, status: str) -> Exception | None:
    """Deliver all rows to the loggers and finalize them.

    Args:
        trainer: the trainer.
        status: how the run ended: "success", "failed" or "interrupted".

    Returns:
        The first error, of a logger or of a failed device; all loggers are finalized nevertheless.
    """
    first_error: Exception | None = None
    try:
        trainer.finish_logging()
    except Exception as error:
        first_error = error
    for each in trainer.loggers:
        try:
            each.finalize(status)
        except Exception as error:
            first_error = first_error or error
    return first_error
