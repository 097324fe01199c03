"""Looks at calls of torch's functions that a `TorchFunctionMode` intercepts: who calls, and with which tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

_LIBRARIES = ("deepspeed.", "drivetrain.", "drivetrain_strategies.", "torch.distributed.fsdp.")


def is_called_by_library() -> bool:
    """Return whether drivetrain, DeepSpeed or FSDP called the function that a `TorchFunctionMode` intercepts.

    Call it in ``__torch_function__``. Frames of torch itself are skipped, so a step of torch's optimizers counts as a
    call of the engine that steps them.
    """
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_LIBRARIES) or not name.startswith("torch."):
            return bool(name.startswith(_LIBRARIES))
        frame = frame.f_back
    return False


def tensors_in(values: Any) -> Iterator[Any]:
    """Yield the tensors among arguments of a function of torch, and those in lists of tensors."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (one for one in value if isinstance(one, torch.Tensor))
