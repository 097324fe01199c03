"""What holds of strategies that keep the whole module on every rank."""

from __future__ import annotations

from drivetrain.strategies import MemoryAdvice


def shard_them(world_size: int) -> MemoryAdvice:
    """The advice to hold a part of the module instead."""
    more = " on several devices" if world_size == 1 else ""
    return MemoryAdvice(
        "state", f"strategy='fsdp'{more}: each rank holds its part of parameters, gradients and optimizer state"
    )
