"""DeepSpeed's ZeRO behind the same interface: `DeepSpeedStrategy`."""

from __future__ import annotations

from drivetrain_strategies.deepspeed.strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy"]
