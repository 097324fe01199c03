"""Looks up drivetrain's strategies, and strategies that other packages register, by name."""

from __future__ import annotations

from typing import Literal

from drivetrain._config.entry_points import EntryPointRegistry
from drivetrain.strategies.strategy import Strategy

StrategyName = Literal[
    "auto",
    "single_device",
    "ddp",
    "ddp_static_graph",
    "ddp_find_unused_parameters_true",
    "fsdp",
    "fsdp_grad_op",
    "hsdp",
    "deepspeed",
    "deepspeed_offload",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_3",
    "deepspeed_stage_1_offload",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3_offload",
]
"""The names of drivetrain's strategies, for completion in editors. Names from other packages are also valid."""


_REGISTRY = EntryPointRegistry[Strategy](
    "strategy",
    "drivetrain.strategies",
    Strategy,  # type: ignore[type-abstract]
    {},  # drivetrain's strategies are registered as entry points too
    meaning="the name selects how a run uses processes and devices",
    alternatives="a Strategy object, such as DDPStrategy(...)",
)


def strategy_by_name(name: str) -> Strategy:
    """Build the strategy registered under ``name``.

    Raises:
        ConfigurationError: the name is not registered. The error lists the known names and the nearest spelling.
    """
    return _REGISTRY.make(name)
