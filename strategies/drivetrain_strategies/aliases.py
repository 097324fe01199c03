"""The names under which `Fit(strategy=...)` finds our strategies, registered as entry points in ``pyproject.toml``."""

from __future__ import annotations

from drivetrain_strategies.ddp.strategy import DDPStrategy
from drivetrain_strategies.single_device import SingleDeviceStrategy


def single_device() -> SingleDeviceStrategy:
    return SingleDeviceStrategy()


def ddp() -> DDPStrategy:
    return DDPStrategy()


def ddp_static_graph() -> DDPStrategy:
    return DDPStrategy(static_graph=True)


def ddp_find_unused_parameters_true() -> DDPStrategy:
    return DDPStrategy(find_unused_parameters=True)
