"""Memory advice shared by the strategies that keep the whole module on every rank."""

from __future__ import annotations

from drivetrain.strategies import MemoryAdvice


def sharding_advice(world_size: int) -> MemoryAdvice:
    """Return the advice to use a strategy that shards the module."""
    condition = " on several devices" if world_size == 1 else ""
    return MemoryAdvice(
        "state", f"strategy='fsdp'{condition}: each rank holds a shard of parameters, gradients and optimizer state"
    )
