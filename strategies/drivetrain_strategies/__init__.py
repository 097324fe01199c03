"""The strategies that come with drivetrain. Every name is imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain_strategies.ddp import DDPStrategy
    from drivetrain_strategies.deepspeed import DeepSpeedStrategy
    from drivetrain_strategies.fsdp import FSDPStrategy
    from drivetrain_strategies.single_device import SingleDeviceStrategy

__all__ = ["DDPStrategy", "DeepSpeedStrategy", "FSDPStrategy", "SingleDeviceStrategy"]

_SUBMODULES = {
    "DDPStrategy": ".ddp",
    "DeepSpeedStrategy": ".deepspeed",
    "FSDPStrategy": ".fsdp",
    "SingleDeviceStrategy": ".single_device",
}


def __getattr__(name: str) -> Any:
    if name not in _SUBMODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_SUBMODULES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return __all__
