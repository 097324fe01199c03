"""The entry points "fsdp", "fsdp_grad_op" and "hsdp". They are in a separate module, since importing FSDP is slow."""

from __future__ import annotations

from drivetrain_strategies.fsdp.strategy import FSDPStrategy


def fsdp() -> FSDPStrategy:
    return FSDPStrategy()


def fsdp_grad_op() -> FSDPStrategy:
    return FSDPStrategy(sharding="grad_op")


def hsdp() -> FSDPStrategy:
    return FSDPStrategy(sharding="hybrid")
