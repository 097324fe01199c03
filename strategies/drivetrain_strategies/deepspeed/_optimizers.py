"""Gives a user's optimizer under DeepSpeed gradients that it may keep."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class GradientCopies:
    """Gives the optimizer copies of the gradients in each step, until `close`.

    DeepSpeed's flat gradients may be buffers that it uses again in the next window. An optimizer that keeps a gradient
    would find it overwritten.

    Args:
        optimizer: the torch optimizer that DeepSpeed steps.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._handles = (
            optimizer.register_step_pre_hook(self._copy),
            optimizer.register_step_post_hook(self._put_back),
        )

    def _copy(self, optimizer: Optimizer, *_: Any) -> None:
        flats = (flat for group in optimizer.param_groups for flat in group["params"])
        self._buffers = [(flat, flat.grad) for flat in flats if flat.grad is not None]
        for flat, buffer in self._buffers:
            flat.grad = buffer.clone()

    def _put_back(self, *_: Any) -> None:
        for flat, buffer in self._buffers:
            flat.grad = buffer
        self._buffers = []

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
