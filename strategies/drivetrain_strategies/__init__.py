"""The strategies that come with drivetrain: where a run computes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain_strategies.ddp import DDPStrategy
    from drivetrain_strategies.deepspeed import DeepSpeedStrategy
    from drivetrain_strategies.fsdp import FSDPStrategy
    from drivetrain_strategies.single_device import SingleDeviceStrategy

__all__ = ["DDPStrategy", "DeepSpeedStrategy", "FSDPStrategy", "SingleDeviceStrategy"]

_HOMES = {
    "DDPStrategy": "drivetrain_strategies.ddp",
    "DeepSpeedStrategy": "drivetrain_strategies.deepspeed",
    "FSDPStrategy": "drivetrain_strategies.fsdp",
    "SingleDeviceStrategy": "drivetrain_strategies.single_device",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
