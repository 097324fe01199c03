"""DeepSpeedStrategy: trains with ZeRO, on DeepSpeed's engine."""

from __future__ import annotations

from drivetrain_strategies.deepspeed.strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy"]
