"""Whole replicas that average their gradients: `DDPStrategy`."""

from __future__ import annotations

from drivetrain_strategies.ddp.strategy import DDPStrategy

__all__ = ["DDPStrategy"]
