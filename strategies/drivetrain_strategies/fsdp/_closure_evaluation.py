"""Runs optimizer steps with a closure. The closure computes with gathered parameters; the step updates the shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drivetrain_strategies.fsdp._data_assignment import DataAssignment
from drivetrain_strategies.fsdp._internals import Sharded


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
