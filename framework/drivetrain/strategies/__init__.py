"""The interface for authors of strategies. Every name is imported on first use.

Subclass `Strategy` for one process and `DistributedStrategy` for several; ``docs/extending.md`` shows an example of
each. drivetrain's own strategies use only the names of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from drivetrain._distributed.collectives import average_together as average_together
    from drivetrain._distributed.collectives import broadcast_together as broadcast_together
    from drivetrain._distributed.control_plane import ControlPlane as ControlPlane
    from drivetrain._distributed.control_plane import LocalControl as LocalControl
    from drivetrain._distributed.control_plane import Pending as Pending
    from drivetrain._distributed.control_plane import absent_error as absent_error
    from drivetrain._distributed.control_plane import spread as spread
    from drivetrain._distributed.process_groups import set_timeout as set_timeout
    from drivetrain._distributed.shards import Box as Box
    from drivetrain._distributed.shards import ParameterShard as ParameterShard
    from drivetrain._distributed.shards import Region as Region
    from drivetrain._distributed.shards import Span as Span
    from drivetrain._distributed.shards import cut as cut
    from drivetrain._runtime.memory_advice import MemoryAdvice as MemoryAdvice
    from drivetrain.checkpoint._loading_hooks import load_current as load_current
    from drivetrain.checkpoint._loading_hooks import resized_buffers as resized_buffers
    from drivetrain.checkpoint._weights_fit import WeightMismatch as WeightMismatch
    from drivetrain.strategies._embedding_checks import refuse_embedding_max_norm as refuse_embedding_max_norm
    from drivetrain.strategies._module_lock import may_move as may_move
    from drivetrain.strategies._optimizer_state import check_optimizer_fits as check_optimizer_fits
    from drivetrain.strategies._optimizer_state import load_named_optimizer_state as load_named_optimizer_state
    from drivetrain.strategies._optimizer_state import named_optimizer_state as named_optimizer_state
    from drivetrain.strategies._replaced_tensors import replace_tensors as replace_tensors
    from drivetrain.strategies._trainable import TrainableChange as TrainableChange
    from drivetrain.strategies._trainable import changed_within_window_error as changed_within_window_error
    from drivetrain.strategies.distributed import DEFAULT_STEP_TIMEOUT as DEFAULT_STEP_TIMEOUT
    from drivetrain.strategies.distributed import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
    from drivetrain.strategies.distributed import DistributedStrategy as DistributedStrategy
    from drivetrain.strategies.registry import known_strategies as known_strategies
    from drivetrain.strategies.registry import strategy_by_name as strategy_by_name
    from drivetrain.strategies.run_settings import RunSettings as RunSettings
    from drivetrain.strategies.strategy import StepRunner as StepRunner
    from drivetrain.strategies.strategy import Strategy as Strategy

_MODULE_BY_NAME = {
    "Box": "drivetrain._distributed.shards",
    "ControlPlane": "drivetrain._distributed.control_plane",
    "DEFAULT_STEP_TIMEOUT": ".distributed",
    "DEFAULT_TIMEOUT": ".distributed",
    "DistributedStrategy": ".distributed",
    "LocalControl": "drivetrain._distributed.control_plane",
    "MemoryAdvice": "drivetrain._runtime.memory_advice",
    "WeightMismatch": "drivetrain.checkpoint._weights_fit",
    "ParameterShard": "drivetrain._distributed.shards",
    "Pending": "drivetrain._distributed.control_plane",
    "Region": "drivetrain._distributed.shards",
    "RunSettings": ".run_settings",
    "Span": "drivetrain._distributed.shards",
    "StepRunner": ".strategy",
    "Strategy": ".strategy",
    "TrainableChange": "._trainable",
    "absent_error": "drivetrain._distributed.control_plane",
    "average_together": "drivetrain._distributed.collectives",
    "broadcast_together": "drivetrain._distributed.collectives",
    "changed_within_window_error": "._trainable",
    "check_optimizer_fits": "._optimizer_state",
    "cut": "drivetrain._distributed.shards",
    "known_strategies": ".registry",
    "load_current": "drivetrain.checkpoint._loading_hooks",
    "load_named_optimizer_state": "._optimizer_state",
    "may_move": "._module_lock",
    "named_optimizer_state": "._optimizer_state",
    "refuse_embedding_max_norm": "._embedding_checks",
    "replace_tensors": "._replaced_tensors",
    "resized_buffers": "drivetrain.checkpoint._loading_hooks",
    "set_timeout": "drivetrain._distributed.process_groups",
    "spread": "drivetrain._distributed.control_plane",
    "strategy_by_name": ".registry",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _MODULE_BY_NAME)
