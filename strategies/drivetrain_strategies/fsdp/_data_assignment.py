"""Makes an assignment to ``.data`` of a sharded parameter take effect."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from drivetrain_strategies.fsdp._state import in_layout_of

SET_DATA = cast(Any, torch.Tensor.data).__set__


class DataAssignment(TorchFunctionMode):
    """Makes ``shard.data = value`` write the value into the shard within this context.

    For a DTensor, torch silently replaces the outer tensor and leaves the local tensor unchanged. Intercepting every
    operation is slow, so the mode is used only for hooks.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == SET_DATA and isinstance(args[0], DTensor):
            assign_data(*args)
            return None
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def assign_data(shard: Any, value: Any) -> None:
    """Write ``value``, which is whole or a DTensor, into ``shard``."""
    part = cast(DTensor, value if isinstance(value, DTensor) else in_layout_of(value, shard))
    shard.to_local().copy_(part.to_local())
