"""DDPStrategy: every rank holds a whole replica, and gradients are averaged."""

from __future__ import annotations

from drivetrain_strategies.ddp.strategy import DDPStrategy

__all__ = ["DDPStrategy"]
