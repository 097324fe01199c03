"""The entry points of ``Fit(strategy=...)`` for the strategies that do not shard, registered in ``pyproject.toml``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain_strategies.ddp.strategy import DDPStrategy
    from drivetrain_strategies.single_device import SingleDeviceStrategy


def single_device() -> SingleDeviceStrategy:
    from drivetrain_strategies.single_device import SingleDeviceStrategy

    return SingleDeviceStrategy()


def ddp() -> DDPStrategy:
    return _ddp()


def ddp_static_graph() -> DDPStrategy:
    return _ddp(static_graph=True)


def ddp_find_unused_parameters_true() -> DDPStrategy:
    return _ddp(find_unused_parameters=True)


def _ddp(**options: Any) -> DDPStrategy:
    from drivetrain_strategies.ddp.strategy import DDPStrategy  # a single process does not need this import

    return DDPStrategy(**options)
