"""The interface for authors of strategies. Every name is imported on first use.

Subclass `Strategy` for one process and `DistributedStrategy` for several; ``docs/extending.md`` shows an example of
each. drivetrain's own strategies use only the names of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from drivetrain._distributed.collectives import average_together, broadcast_together
    from drivetrain._distributed.control_plane import ControlPlane, LocalControl
    from drivetrain._distributed.process_groups import set_timeout
    from drivetrain._distributed.shards import Box, ParameterShard, Region, Span, cut
    from drivetrain._runtime.memory_advice import MemoryAdvice
    from drivetrain.checkpoint._loading_hooks import load_current, resized_buffers
    from drivetrain.checkpoint._weights_fit import WeightMismatch
    from drivetrain.strategies._module_lock import may_move
    from drivetrain.strategies._optimizer_state import (
        check_optimizer_fits,
        load_named_optimizer_state,
        named_optimizer_state,
    )
    from drivetrain.strategies._replaced_tensors import replace_tensors
    from drivetrain.strategies._trainable import TrainableChange, changed_within_window_error
    from drivetrain.strategies.distributed import (
        DEFAULT_STEP_TIMEOUT,
        DEFAULT_TIMEOUT,
        DistributedStrategy,
        refuse_embedding_max_norm,
    )
    from drivetrain.strategies.registry import known_strategies, strategy_by_name
    from drivetrain.strategies.strategy import RunSettings, StepRunner, Strategy

_NAMES_BY_MODULE = {
    "._module_lock": ("may_move",),
    "._optimizer_state": ("check_optimizer_fits", "load_named_optimizer_state", "named_optimizer_state"),
    "._replaced_tensors": ("replace_tensors",),
    "._trainable": ("TrainableChange", "changed_within_window_error"),
    ".distributed": ("DEFAULT_STEP_TIMEOUT", "DEFAULT_TIMEOUT", "DistributedStrategy", "refuse_embedding_max_norm"),
    ".registry": ("known_strategies", "strategy_by_name"),
    ".strategy": ("RunSettings", "StepRunner", "Strategy"),
    "drivetrain._distributed.collectives": ("average_together", "broadcast_together"),
    "drivetrain._distributed.control_plane": ("ControlPlane", "LocalControl"),
    "drivetrain._distributed.process_groups": ("set_timeout",),
    "drivetrain._distributed.shards": ("Box", "ParameterShard", "Region", "Span", "cut"),
    "drivetrain._runtime.memory_advice": ("MemoryAdvice",),
    "drivetrain.checkpoint._loading_hooks": ("load_current", "resized_buffers"),
    "drivetrain.checkpoint._weights_fit": ("WeightMismatch",),
}

__all__ = [
    "DEFAULT_STEP_TIMEOUT",
    "DEFAULT_TIMEOUT",
    "Box",
    "ControlPlane",
    "DistributedStrategy",
    "LocalControl",
    "MemoryAdvice",
    "ParameterShard",
    "Region",
    "RunSettings",
    "Span",
    "StepRunner",
    "Strategy",
    "TrainableChange",
    "WeightMismatch",
    "average_together",
    "broadcast_together",
    "changed_within_window_error",
    "check_optimizer_fits",
    "cut",
    "known_strategies",
    "load_current",
    "load_named_optimizer_state",
    "may_move",
    "named_optimizer_state",
    "refuse_embedding_max_norm",
    "replace_tensors",
    "resized_buffers",
    "set_timeout",
    "strategy_by_name",
]

__getattr__, __dir__ = lazy_names(
    __name__, {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}
)
