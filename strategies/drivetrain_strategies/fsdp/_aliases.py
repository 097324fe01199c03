"""The entry points "fsdp", "fsdp_grad_op" and "hsdp". They are in a separate module, since importing FSDP is slow."""

from __future__ import annotations

from functools import partial

from drivetrain_strategies.fsdp.strategy import FSDPStrategy

fsdp = FSDPStrategy
fsdp_grad_op = partial(FSDPStrategy, sharding="grad_op")
hsdp = partial(FSDPStrategy, sharding="hybrid")
