"""Ranks that tests share: started once in each of pytest's processes, and closed at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.testing import World

# What most functions of the tests import, once for all ranks: the fork server has it, and they inherit it.
PRELOAD = (
    "pytest",
    "torchmetrics.classification",
    "drivetrain.fit",
    "drivetrain._engine.session",
    "drivetrain_strategies.ddp.strategy",
    "drivetrain_strategies.fsdp.strategy",
)

# It decorates a function with torch.compile, which imports all of that: three seconds on each rank that trains by ZeRO.
# And where ZeRO 3 collects garbage, which it does once a run, none of this has to be looked at.
DEEPSPEED = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")

_preload = [*PRELOAD]
_worlds: dict[int, World] = {}


def preload(*modules: str) -> None:
    """Have all ranks inherit these modules, too. Comes before the first `on_ranks`."""
    _preload.extend(modules)


def on_ranks(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    process_group: str | None = "gloo",
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Do as `run_distributed`, on ranks that have run other tests' functions before.

    For functions that leave no mark on their process: one that does so takes `run_distributed`.
    """
    world = _worlds.setdefault(nprocs, World(nprocs, preload=_preload))
    return world.run(fn, *args, process_group=process_group, timeout=timeout, env=env)


def close_worlds() -> None:
    """End all ranks."""
    while _worlds:
        _worlds.popitem()[1].close()
