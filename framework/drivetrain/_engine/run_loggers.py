"""What a run tells its loggers besides numbers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.loggers import Logger
from drivetrain.run_context import RunContext

logger = logging.getLogger("drivetrain")


def begin_logging(loggers: Sequence[Logger], step: int | None, hyper_parameters: Mapping[str, Any]) -> None:
    """Let loggers drop what an earlier part of the run logged too much, and keep the hyper-parameters. On rank 0 only.

    Args:
        loggers: the run's.
        step: the optimizer step that the run goes on from, -1 for its beginning; None where its folder is new.
        hyper_parameters: without secrets.
    """
    for one in loggers:
        if step is not None:
            one.rewind(step)
        if hyper_parameters:
            one.log_hyperparams(hyper_parameters)


def write_out(trainer: RunContext) -> None:
    """Let loggers write what they hold back, as a checkpoint is written: a run that goes on from it finds it all."""
    saves = [(type(one).__name__, one.save) for one in trainer.loggers]
    for name, write in [("A logger", trainer.finish_logging), *saves]:
        try:
            write()
        except Exception as error:  # each service has errors of its own, and for none may a checkpoint be missing
            logger.warning("%s could not write what was logged so far, and tries again later: %s", name, error)


def finish_logging(trainer: RunContext, status: str) -> Exception | None:
    """Let loggers write out everything and close.

    Args:
        trainer: whose loggers.
        status: how the run ended: "success", "failed" or "interrupted".

    Returns:
        The first exception, of a device that has failed or of a logger; the other loggers were closed all the same.
    """
    problem: Exception | None = None
    try:
        trainer.finish_logging()
    except Exception as error:
        problem = error
    for one in trainer.loggers:
        try:
            one.finalize(status)
        except Exception as error:
            problem = problem or error
    return problem
