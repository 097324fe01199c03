"""Collective calls from user code, looked at before they can hang."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch

from drivetrain._distributed.control import ControlPlane
from drivetrain._runtime.transfer import map_tensors
from drivetrain.strategies.strategy import Strategy

_ARRIVE = timedelta(seconds=30)


class CollectiveCalls:
    """Makes sure that a collective call comes on every rank: one under ``if is_global_zero:`` is refused.

    Looked at is each place in the code, once: a place that all ranks reach together the first time they reach together.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[str, int]] = set()

    def check(self, control: ControlPlane, what: str, every_time: bool = False) -> None:
        """Wait for the other ranks to come to the same call.

        Raises:
            DistributedError: some did not, within half a minute; names them.
        """
        if control.world_size == 1:
            return
        place = _calling_line()
        if place in self._seen and not every_time:
            return
        self._seen.add(place)
        control.agree(f"{what} at {place[0]}:{place[1]}", timeout=_ARRIVE)

    def gather(self, strategy: Strategy, data: Any, sync_grads: bool) -> Any:
        """Gather every tensor and number of a nested collection; each of shape (*S) becomes (W, *S)."""

        def gathered(value: Any) -> Any:
            return strategy.all_gather(value, sync_grads) if isinstance(value, torch.Tensor) else value

        return map_tensors(_as_tensors(data, strategy.device), gathered)


def _as_tensors(data: Any, device: torch.device) -> Any:
    if isinstance(data, bool | int | float):
        return torch.tensor(data, device=device)
    if isinstance(data, dict):
        return {key: _as_tensors(value, device) for key, value in data.items()}
    if isinstance(data, list | tuple) and not hasattr(data, "_fields"):
        return type(data)(_as_tensors(value, device) for value in data)
    return data


def _calling_line() -> tuple[str, int]:
    """The line of user code that a call came from: the first frame that is not the framework's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("drivetrain."):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
