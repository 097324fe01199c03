"""What a run tells its loggers besides numbers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from drivetrain._config.secret_values import LeftOut
from drivetrain.data import DataModule
from drivetrain.loggers import Logger
from drivetrain.module.train_module import TrainModule

logger = logging.getLogger("drivetrain")


def rewind(loggers: Sequence[Logger], step: int | None) -> None:
    """Let them drop what an earlier part of the run logged after ``step``, from which it goes on. On rank 0 only.

    Args:
        loggers: the run's.
        step: optimizer steps; -1 for all, None where the run has a folder of its own.
    """
    if step is not None:
        for one in loggers:
            one.rewind(step)


def write_out(loggers: Sequence[Logger]) -> None:
    """Let them write what they hold back, as a checkpoint is written: a run that goes on from it finds it all."""
    for one in loggers:
        try:
            one.save()
        except OSError as error:
            logger.warning(
                "%s could not write what was logged so far, and tries again later: %s", type(one).__name__, error
            )


def log_hyper_parameters(
    loggers: Sequence[Logger], module: TrainModule, datamodule: DataModule | None, left_out: LeftOut
) -> None:
    """Let them keep what the module and the data module were built with, without its secrets. On rank 0 only."""
    params = {**({} if datamodule is None else datamodule.hparams), **module.hparams}
    if params and loggers:
        public, _ = left_out.take_out(params)
        for one in loggers:
            one.log_hyperparams(public)
