"""The strategies that come with drivetrain: where a run computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.strategies import lazy_names

if TYPE_CHECKING:
    from drivetrain_strategies.ddp import DDPStrategy
    from drivetrain_strategies.deepspeed import DeepSpeedStrategy
    from drivetrain_strategies.fsdp import FSDPStrategy
    from drivetrain_strategies.single_device import SingleDeviceStrategy

__all__ = ["DDPStrategy", "DeepSpeedStrategy", "FSDPStrategy", "SingleDeviceStrategy"]

_HOMES = {
    "DDPStrategy": ".ddp",
    "DeepSpeedStrategy": ".deepspeed",
    "FSDPStrategy": ".fsdp",
    "SingleDeviceStrategy": ".single_device",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
