"""The interface for authors of strategies. Every name is imported on first use.

Subclass `Strategy` for one process and `DistributedStrategy` for several; ``docs/extending.md`` shows an example of
each. drivetrain's own strategies use only the names of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from drivetrain._distributed.collectives import average_gradients as average_gradients
    from drivetrain._distributed.collectives import broadcast_together as broadcast_together
    from drivetrain._distributed.control_plane import ControlPlane as ControlPlane
    from drivetrain._distributed.process_groups import set_timeout as set_timeout
    from drivetrain._distributed.shards import Box as Box
    from drivetrain._distributed.shards import ParameterShard as ParameterShard
    from drivetrain._distributed.shards import Region as Region
    from drivetrain._distributed.shards import Span as Span
    from drivetrain._distributed.shards import cut as cut
    from drivetrain._parameters.loading_hooks import load_tensors as load_tensors
    from drivetrain._parameters.module_lock import may_move as may_move
    from drivetrain._parameters.optimizer_state import check_optimizer_fits as check_optimizer_fits
    from drivetrain._parameters.optimizer_state import load_named_optimizer_state as load_named_optimizer_state
    from drivetrain._parameters.optimizer_state import named_optimizer_state as named_optimizer_state
    from drivetrain._parameters.replaced_tensors import add_gradient_hook as add_gradient_hook
    from drivetrain._parameters.replaced_tensors import copy_attributes_and_hooks as copy_attributes_and_hooks
    from drivetrain._parameters.replaced_tensors import replace_tensors as replace_tensors
    from drivetrain._parameters.trainable import TrainableChange as TrainableChange
    from drivetrain._parameters.trainable import changed_within_window_error as changed_within_window_error
    from drivetrain.strategies.distributed import DEFAULT_STEP_TIMEOUT as DEFAULT_STEP_TIMEOUT
    from drivetrain.strategies.distributed import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
    from drivetrain.strategies.distributed import DistributedStrategy as DistributedStrategy
    from drivetrain.strategies.registry import strategy_by_name as strategy_by_name
    from drivetrain.strategies.strategy import RunSettings as RunSettings
    from drivetrain.strategies.strategy import StepRunner as StepRunner
    from drivetrain.strategies.strategy import Strategy as Strategy

_NAMES_BY_MODULE = {
    "drivetrain._parameters.module_lock": ("may_move",),
    "drivetrain._parameters.optimizer_state": (
        "check_optimizer_fits",
        "load_named_optimizer_state",
        "named_optimizer_state",
    ),
    "drivetrain._parameters.replaced_tensors": ("add_gradient_hook", "copy_attributes_and_hooks", "replace_tensors"),
    "drivetrain._parameters.trainable": ("TrainableChange", "changed_within_window_error"),
    ".distributed": ("DEFAULT_STEP_TIMEOUT", "DEFAULT_TIMEOUT", "DistributedStrategy"),
    ".registry": ("strategy_by_name",),
    ".strategy": ("RunSettings", "StepRunner", "Strategy"),
    "drivetrain._distributed.collectives": ("average_gradients", "broadcast_together"),
    "drivetrain._distributed.control_plane": ("ControlPlane",),
    "drivetrain._distributed.process_groups": ("set_timeout",),
    "drivetrain._distributed.shards": ("Box", "ParameterShard", "Region", "Span", "cut"),
    "drivetrain._parameters.loading_hooks": ("load_tensors",),
}

__getattr__, __dir__, __all__ = lazy_names(
    __name__, {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
)
