"""Runs optimizer steps with a closure. The closure computes with gathered parameters; the step updates the shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from drivetrain_strategies.fsdp._internals import Sharded
from drivetrain_strategies.fsdp._state import in_layout_of

_SET_DATA = cast(Any, torch.Tensor.data).__set__


def step_with_closure(
    closure: Callable[[], Any], step: Callable[[Callable[[], Any]], bool], sharded: Sharded, within_forward: bool
) -> bool:
    """Run ``step(closure)`` and return its result.

    Args:
        closure: runs forward and backward.
        step: updates the shards.
        sharded: the sharded module.
        within_forward: whether the step runs within the root's forward. The root's parameters must then be gathered
            again before each evaluation, since the root's forward gathers them only at its start.
    """
    data_assignment = DataAssignment()

    def evaluate_closure() -> Any:
        with data_assignment.paused():
            if within_forward:
                sharded.gather_root()
            loss = closure()
            if within_forward:
                sharded.reshard()
            return loss

    if within_forward:
        sharded.reshard()
    with data_assignment:
        stepped = step(evaluate_closure)
    if within_forward:
        sharded.gather_root()
    return stepped


class DataAssignment(TorchFunctionMode):
    """Makes ``shard.data = value`` write the value into the shard within this context.

    For a DTensor, torch silently replaces the outer tensor and leaves the local tensor unchanged. SAM, which restores
    weights this way, would continue from the perturbed weights. Intercepting every operation is slow, so the mode is
    used only for steps with a closure.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA and isinstance(args[0], DTensor):
            shard, value = args
            part = cast(DTensor, value if isinstance(value, DTensor) else in_layout_of(value, cast(Any, shard)))
            with torch.no_grad():
                shard.to_local().copy_(part.to_local())
            return None
        return func(*args, **(kwargs or {}))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Disable the mode within this context, for the closure's forward and backward."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]
