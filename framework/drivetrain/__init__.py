"""drivetrain: train PyTorch models with the same code on one device and on many.

Public names are imported on first use, so that ``import drivetrain`` takes no longer than ``import torch``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_MODULE_BY_NAME = {
    "Callback": "drivetrain.callback",
    "CheckpointError": "drivetrain.errors",
    "ConfigurationError": "drivetrain.errors",
    "DataModule": "drivetrain.data",
    "DistributedError": "drivetrain.errors",
    "DrivetrainError": "drivetrain.errors",
    "Fit": "drivetrain.fit",
    "Logger": "drivetrain.loggers",
    "LossSpikeError": "drivetrain.errors",
    "NonFiniteError": "drivetrain.errors",
    "Precision": "drivetrain.precision",
    "RunContext": "drivetrain.run_context",
    "Strategy": "drivetrain.strategies.strategy",
    "TrainModule": "drivetrain.module.train_module",
    "grad_norm": "drivetrain._module.gradient_norms",
    "rank_zero_info": "drivetrain._rank_zero",
    "rank_zero_only": "drivetrain._rank_zero",
    "rank_zero_warn": "drivetrain._rank_zero",
    "seed_everything": "drivetrain._runtime.seed",
}
_SUBMODULES = frozenset(
    {
        "callbacks",
        "checkpoint",
        "data",
        "environments",
        "launchers",
        "loggers",
        "precision",
        "profilers",
        "strategies",
        "testing",
        "tuner",
    }
)

__all__ = [
    "Callback",
    "CheckpointError",
    "ConfigurationError",
    "DataModule",
    "DistributedError",
    "DrivetrainError",
    "Fit",
    "Logger",
    "LossSpikeError",
    "NonFiniteError",
    "Precision",
    "RunContext",
    "Strategy",
    "TrainModule",
    "callbacks",
    "checkpoint",
    "data",
    "environments",
    "grad_norm",
    "launchers",
    "loggers",
    "precision",
    "profilers",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "seed_everything",
    "strategies",
    "testing",
    "tuner",
]


set_rank_on_import()


def __getattr__(name: str) -> Any:
    if name in _MODULE_BY_NAME:
        value = getattr(import_module(_MODULE_BY_NAME[name]), name)
    elif name in _SUBMODULES:
        value = import_module(f"drivetrain.{name}")
    else:
        raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")
    globals()[name] = value  # so that later look-ups do not call `__getattr__`
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
