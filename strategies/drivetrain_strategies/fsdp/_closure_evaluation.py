"""A step that evaluates the loss anew: shards train, whole parameters compute, and the two take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from drivetrain_strategies.fsdp._internals import Sharded
from drivetrain_strategies.fsdp._state import like

_ASSIGN = cast(Any, torch.Tensor.data).__set__


def step_with(
    closure: Callable[[], Any], step: Callable[[Callable[[], Any]], bool], sharded: Sharded, inside: bool
) -> bool:
    """Return what ``step(closure)`` does.

    Args:
        closure: runs forward and backward.
        step: changes the shards.
        sharded: whose they are.
        inside: within the root's forward, which gathers the root's own parameters only once.
    """
    writes = DataWrites()

    def evaluated() -> Any:
        with writes.paused():
            if inside:
                sharded.gather_root()
            loss = closure()
            if inside:
                sharded.reshard()
            return loss

    if inside:
        sharded.reshard()
    with writes:
        stepped = step(evaluated)
    if inside:
        sharded.gather_root()
    return stepped


class DataWrites(TorchFunctionMode):
    """Within it ``shard.data = value`` writes the value into the shard.

    Torch exchanges the outside of a DTensor and leaves the tensor in it as it was, in silence: SAM, which puts weights
    back like that, would go on from where it had climbed to. Every operation passes through here, so that it is for
    steps with a closure alone.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _ASSIGN and isinstance(args[0], DTensor):
            shard, value = args
            part = cast(DTensor, value if isinstance(value, DTensor) else like(value, cast(Any, shard)))
            with torch.no_grad():
                shard.to_local().copy_(part.to_local())
            return None
        return func(*args, **(kwargs or {}))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave it for a while: a closure's forward and backward are none of its business."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]
