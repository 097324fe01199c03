"""Checks that a collective call in user code is made on every rank, before the call can hang."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import FrameType
from typing import Any

import torch

from drivetrain._engine.assembly.run_parts import RunCore
from drivetrain._runtime.transfer import map_tensors

_ARRIVAL_TIMEOUT = timedelta(minutes=2)
"""How long a call waits for ranks that may be in a collective of torch, whose timeout is longer."""

_APART = ("evaluation", "prediction")
"""The loops in which ranks may be far apart, so that a call waits as long as the strategy allows."""


class CollectiveCalls:
    """Makes collective calls of user code, once all ranks have reached the same call.

    A call under ``if is_global_zero:`` raises an error. ``training_step`` may gather in every step, so it waits to
    gather only in the first window in which it does.

    Args:
        core: the parts of the run.
    """

    def __init__(self, core: RunCore) -> None:
        self._core = core
        self._first_window: tuple[int, int] | None = None

    def check(self, kind: str) -> None:
        """Wait for the other ranks to reach the same call.

        Args:
            kind: the kind of call, such as "all_gather".

        Raises:
            DistributedError: ranks did not reach the call in time, or reached another call. The error names them.
        """
        control = self._core.strategy.control
        if control.world_size > 1:
            timeout = None if self._core.position.loop in _APART else _ARRIVAL_TIMEOUT
            control.count_flags(f"{kind} ({self._describe_position()})", timeout=timeout)

    def all_gather(self, data: Any, sync_grads: bool) -> Any:
        """Gather every tensor and number of a nested collection. Shape (*S) becomes (W, *S) for world size W."""
        if not self._is_in_later_window(sys._getframe(1)):
            self.check("all_gather")
        strategy = self._core.strategy

        def gathered(value: Any) -> Any:
            return strategy.all_gather(value, sync_grads) if isinstance(value, torch.Tensor) else value

        return map_tensors(_as_tensors(data, strategy.device), gathered)

    def _is_in_later_window(self, frame: FrameType | None) -> bool:
        """Return whether ``training_step`` runs in ``frame``, and a window has closed since it first called."""
        if self._core.position.loop != "training":
            return False
        step = getattr(self._core.module.training_step, "__code__", None)
        while frame is not None and frame.f_code is not step:
            frame = frame.f_back
        if frame is None:
            return False
        window = self._core.progress.window
        self._first_window = self._first_window or window
        return window != self._first_window

    def _describe_position(self) -> str:
        """Return the run's position as text that is the same on every rank."""
        progress, position = self._core.progress, self._core.position
        place = "between loops" if position.loop is None else f"{position.loop} batch {position.batch_idx}"
        return f"{place}, epoch {progress.epoch}, global step {progress.global_step}"


def _as_tensors(data: Any, device: torch.device) -> Any:
    if isinstance(data, bool | int | float):
        return torch.tensor(data, device=device)
    if isinstance(data, dict):
        return {key: _as_tensors(value, device) for key, value in data.items()}
    if isinstance(data, list | tuple) and not hasattr(data, "_fields"):
        return type(data)(_as_tensors(value, device) for value in data)
    return data
