"""What a run tells its loggers besides numbers."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain._config.secret_values import LeftOut
from drivetrain._distributed.control import ControlPlane
from drivetrain.data import DataModule
from drivetrain.loggers import Logger
from drivetrain.module.train_module import TrainModule


def share_versions(loggers: Sequence[Logger], control: ControlPlane) -> None:
    """Let every rank's loggers name the place where rank 0's write."""
    if not loggers or control.world_size == 1:
        return
    versions = control.from_rank_0([one.version for one in loggers] if control.rank == 0 else None)
    if control.rank > 0:
        for one, version in zip(loggers, versions, strict=False):
            one.adopt(version)


def log_hyper_parameters(
    loggers: Sequence[Logger], module: TrainModule, datamodule: DataModule | None, left_out: LeftOut
) -> None:
    """Let them keep what the module and the data module were built with, without its secrets. On rank 0 only."""
    params = {**({} if datamodule is None else datamodule.hparams), **module.hparams}
    if params and loggers:
        public, _ = left_out.take_out(params)
        for one in loggers:
            one.log_hyperparams(public)
