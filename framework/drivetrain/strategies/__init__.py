"""What an author of a strategy needs, every name imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._runtime.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from drivetrain._distributed.collectives import broadcast_together as broadcast_together
    from drivetrain._distributed.control import ControlPlane as ControlPlane
    from drivetrain._distributed.control import LocalControl as LocalControl
    from drivetrain._distributed.control import Pending as Pending
    from drivetrain._distributed.control import absent_error as absent_error
    from drivetrain._distributed.control import spread as spread
    from drivetrain._distributed.groups import set_timeout as set_timeout
    from drivetrain._distributed.shards import Box as Box
    from drivetrain._distributed.shards import Region as Region
    from drivetrain._distributed.shards import Shard as Shard
    from drivetrain._distributed.shards import Span as Span
    from drivetrain._distributed.shards import cut as cut
    from drivetrain._runtime.lazy_names import lazy_names as lazy_names
    from drivetrain._runtime.sizes import size_in_words as size_in_words
    from drivetrain.checkpoint._weights_fit import Misfit as Misfit
    from drivetrain.module.train_module import TrainModule as TrainModule
    from drivetrain.module.train_module import hold as hold
    from drivetrain.module.train_module import release as release
    from drivetrain.precision._default_dtype import DefaultDtype as DefaultDtype
    from drivetrain.precision._loss_scaler import FLOOR as FLOOR
    from drivetrain.strategies._optimizer_state import check_optimizer_fits as check_optimizer_fits
    from drivetrain.strategies._optimizer_state import load_named_optimizer_state as load_named_optimizer_state
    from drivetrain.strategies._optimizer_state import named_optimizer_state as named_optimizer_state
    from drivetrain.strategies._trainable import TRAINS as TRAINS
    from drivetrain.strategies._trainable import changed_within_window as changed_within_window
    from drivetrain.strategies._trainable import listed as listed
    from drivetrain.strategies.distributed import DEFAULT_STEP_TIMEOUT as DEFAULT_STEP_TIMEOUT
    from drivetrain.strategies.distributed import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
    from drivetrain.strategies.distributed import DistributedStrategy as DistributedStrategy
    from drivetrain.strategies.run_settings import RunSettings as RunSettings
    from drivetrain.strategies.strategy import StepRunner as StepRunner
    from drivetrain.strategies.strategy import Strategy as Strategy
_HOME = {
    "DEFAULT_STEP_TIMEOUT": ".distributed",
    "DEFAULT_TIMEOUT": ".distributed",
    "DistributedStrategy": ".distributed",
    "RunSettings": ".run_settings",
    "StepRunner": ".strategy",
    "Strategy": ".strategy",
    "check_optimizer_fits": "._optimizer_state",
    "load_named_optimizer_state": "._optimizer_state",
    "named_optimizer_state": "._optimizer_state",
    "TRAINS": "._trainable",
    "changed_within_window": "._trainable",
    "listed": "._trainable",
    "broadcast_together": "drivetrain._distributed.collectives",
    "ControlPlane": "drivetrain._distributed.control",
    "LocalControl": "drivetrain._distributed.control",
    "Pending": "drivetrain._distributed.control",
    "absent_error": "drivetrain._distributed.control",
    "spread": "drivetrain._distributed.control",
    "set_timeout": "drivetrain._distributed.groups",
    "Box": "drivetrain._distributed.shards",
    "Region": "drivetrain._distributed.shards",
    "Shard": "drivetrain._distributed.shards",
    "Span": "drivetrain._distributed.shards",
    "cut": "drivetrain._distributed.shards",
    "lazy_names": "drivetrain._runtime.lazy_names",
    "size_in_words": "drivetrain._runtime.sizes",
    "Misfit": "drivetrain.checkpoint._weights_fit",
    "TrainModule": "drivetrain.module.train_module",
    "hold": "drivetrain.module.train_module",
    "release": "drivetrain.module.train_module",
    "DefaultDtype": "drivetrain.precision._default_dtype",
    "FLOOR": "drivetrain.precision._loss_scaler",
}
__all__ = [
    "DEFAULT_STEP_TIMEOUT",
    "DEFAULT_TIMEOUT",
    "FLOOR",
    "TRAINS",
    "Box",
    "ControlPlane",
    "DefaultDtype",
    "DistributedStrategy",
    "LocalControl",
    "Misfit",
    "Pending",
    "Region",
    "RunSettings",
    "Shard",
    "Span",
    "StepRunner",
    "Strategy",
    "TrainModule",
    "absent_error",
    "broadcast_together",
    "changed_within_window",
    "check_optimizer_fits",
    "cut",
    "hold",
    "lazy_names",
    "listed",
    "load_named_optimizer_state",
    "named_optimizer_state",
    "release",
    "set_timeout",
    "size_in_words",
    "spread",
]
__getattr__, __dir__ = _lazy_names(__name__, _HOME)
