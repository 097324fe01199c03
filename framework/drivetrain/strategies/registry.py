"""Strategies by name: those that come with drivetrain, and those that other packages register."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal

from drivetrain.errors import ConfigurationError, nearest
from drivetrain.strategies.strategy import Strategy

ENTRY_POINT_GROUP = "drivetrain.strategies"

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
"""The names that come with drivetrain, for editors to complete; those of other packages are as good."""


def known_strategies() -> dict[str, Any]:
    """Every registered name with its entry point, ours and third parties' alike."""
    return dict(_registered(tuple(sys.path)))


@cache
def _registered(path: tuple[str, ...]) -> dict[str, Any]:
    """Read what is installed where modules are imported from: once for each such ``path``, for it takes 8 ms."""
    return {point.name: point for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name)}


def strategy_by_name(name: str) -> Strategy:
    """Build the strategy registered under ``name``.

    Raises:
        ConfigurationError: nobody registered the name; lists the known ones and the nearest spelling.
    """
    known = known_strategies()
    if name not in known:
        _registered.cache_clear()  # its package may have been installed since
        known = known_strategies()
    if name not in known:
        names: Iterable[str] = ["auto", *known]
        raise ConfigurationError(
            f"Unknown strategy {name!r}.{nearest(name, names)}",
            "strategies are found by name in the entry-point group 'drivetrain.strategies'.",
            f"use one of {', '.join(names)}, or pass a Strategy object.",
        )
    strategy = known[name].load()()
    if not isinstance(strategy, Strategy):
        raise ConfigurationError(
            f"The strategy {name!r} ({known[name].value}) made a {type(strategy).__name__}, which is not a Strategy.",
            "the engine drives strategies through that interface.",
            "make the entry point a callable without arguments that returns a drivetrain.Strategy.",
        )
    return strategy
