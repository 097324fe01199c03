"""`DeepSpeedStrategy`: ZeRO by DeepSpeed's own engine."""

from __future__ import annotations

from drivetrain_strategies.deepspeed.strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy"]
