"""Parameters, gradients and optimizer state in shards, on `fully_shard`: `FSDPStrategy`."""

from __future__ import annotations

from drivetrain_strategies.fsdp.strategy import FSDPStrategy

__all__ = ["FSDPStrategy"]
