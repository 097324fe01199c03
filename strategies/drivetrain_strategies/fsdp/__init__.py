"""FSDPStrategy: shards parameters, gradients and optimizer state with `fully_shard`."""

from __future__ import annotations

from drivetrain_strategies.fsdp.strategy import FSDPStrategy

__all__ = ["FSDPStrategy"]
