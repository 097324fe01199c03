"""drivetrain: train PyTorch models with the same code on one device and on many.

Public names are imported on first use, so that ``import drivetrain`` takes no longer than ``import torch``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._runtime.lazy_names import lazy_names
from drivetrain._utilities_rank import set_rank_on_import

if TYPE_CHECKING:
    from drivetrain import callbacks as callbacks
    from drivetrain import checkpoint as checkpoint
    from drivetrain import data as data
    from drivetrain import environments as environments
    from drivetrain import launchers as launchers
    from drivetrain import loggers as loggers
    from drivetrain import precision as precision
    from drivetrain import profilers as profilers
    from drivetrain import strategies as strategies
    from drivetrain import testing as testing
    from drivetrain import tuner as tuner
    from drivetrain._module.gradient_norms import grad_norm as grad_norm
    from drivetrain._rank_zero import rank_zero_info as rank_zero_info
    from drivetrain._rank_zero import rank_zero_only as rank_zero_only
    from drivetrain._rank_zero import rank_zero_warn as rank_zero_warn
    from drivetrain._runtime.seed import seed_everything as seed_everything
    from drivetrain.callback import Callback as Callback
    from drivetrain.data import DataModule as DataModule
    from drivetrain.errors import CheckpointError as CheckpointError
    from drivetrain.errors import ConfigurationError as ConfigurationError
    from drivetrain.errors import DistributedError as DistributedError
    from drivetrain.errors import DrivetrainError as DrivetrainError
    from drivetrain.errors import LossSpikeError as LossSpikeError
    from drivetrain.errors import NonFiniteError as NonFiniteError
    from drivetrain.fit import Fit as Fit
    from drivetrain.loggers import Logger as Logger
    from drivetrain.module.train_module import TrainModule as TrainModule
    from drivetrain.precision import Precision as Precision
    from drivetrain.run_context import RunContext as RunContext
    from drivetrain.strategies.strategy import Strategy as Strategy

__version__ = "0.1.0"

_HOME = {
    "Callback": ".callback",
    "CheckpointError": ".errors",
    "ConfigurationError": ".errors",
    "DataModule": ".data",
    "DistributedError": ".errors",
    "DrivetrainError": ".errors",
    "Fit": ".fit",
    "Logger": ".loggers",
    "LossSpikeError": ".errors",
    "NonFiniteError": ".errors",
    "Precision": ".precision",
    "RunContext": ".run_context",
    "Strategy": ".strategies.strategy",
    "TrainModule": ".module.train_module",
    "callbacks": ".callbacks",
    "checkpoint": ".checkpoint",
    "data": ".data",
    "environments": ".environments",
    "grad_norm": "._module.gradient_norms",
    "launchers": ".launchers",
    "loggers": ".loggers",
    "precision": ".precision",
    "profilers": ".profilers",
    "rank_zero_info": "._rank_zero",
    "rank_zero_only": "._rank_zero",
    "rank_zero_warn": "._rank_zero",
    "seed_everything": "._runtime.seed",
    "strategies": ".strategies",
    "testing": ".testing",
    "tuner": ".tuner",
}

set_rank_on_import()

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
