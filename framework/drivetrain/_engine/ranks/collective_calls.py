"""Checks that a collective call in user code is made on every rank, before the call can hang."""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch

from drivetrain._engine.assembly.run_core import RunCore
from drivetrain._runtime.transfer import map_tensors

_ARRIVAL_TIMEOUT = timedelta(minutes=2)
"""How long a call waits for ranks that may be in a collective of torch, whose timeout is longer."""

_APART = ("evaluation", "prediction")
"""The loops in which ranks may be far apart, so that a call waits as long as the strategy allows."""


def check_collective(run: RunCore, kind: str) -> None:
    """Wait for the other ranks to reach the same call. A call under ``if is_global_zero:`` raises an error.

    Args:
        run: the run.
        kind: the kind of call, such as "all_gather".

    Raises:
        DistributedError: ranks did not reach the call in time, or reached another call. The error names them.
    """
    control, progress, current = run.strategy.control, run.progress, run.current
    if control.world_size > 1:
        place = "between loops" if current.loop is None else f"{current.loop} batch {current.batch_idx}"
        purpose = f"{kind} ({place}, epoch {progress.epoch}, global step {progress.global_step})"
        control.monitored_barrier(purpose, timeout=None if current.loop in _APART else _ARRIVAL_TIMEOUT)


def all_gather(run: RunCore, data: Any, sync_grads: bool) -> Any:
    """Gather every tensor and number of a nested collection. Shape (*S) becomes (W, *S) for world size W.

    ``training_step`` may gather in every step, so it waits for the other ranks only in the first window in which it
    does.
    """
    from lightning_utilities.core.apply_func import apply_to_collection  # importing Fit does not need it

    if not _is_in_later_window(run, sys._getframe(1)):
        check_collective(run, "all_gather")
    strategy = run.strategy

    def gathered(value: Any) -> Any:
        return strategy.all_gather(value, sync_grads) if isinstance(value, torch.Tensor) else value

    numbers_as_tensors = partial(torch.tensor, device=strategy.device)
    return map_tensors(apply_to_collection(data, (bool, int, float), numbers_as_tensors), gathered)


def _is_in_later_window(run: RunCore, frame: FrameType | None) -> bool:
    """Return whether ``training_step`` runs in ``frame``, and a window has closed since it first called."""
    if run.current.loop != "training":
        return False
    step = getattr(run.module.training_step, "__code__", None)
    while frame is not None and frame.f_code is not step:
        frame = frame.f_back
    if frame is None:
        return False
    run.first_gather = run.first_gather or run.progress.window
    return run.progress.window != run.first_gather
