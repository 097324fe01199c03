"""Broadcasts rank 0's initial values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from drivetrain.strategies import broadcast_together


def broadcast_from_rank_0(tensors: Iterable[torch.Tensor], device: torch.device, data_group: Any = None) -> None:
    """Move tensors to ``device`` and broadcast rank 0's values. Collective, with one broadcast per dtype.

    Meta tensors are skipped. The local part of a DTensor (tensor parallelism) is broadcast over ``data_group`` from
    that group's first rank.
    """
    whole: list[Any] = []
    split: list[Any] = []
    for tensor in tensors:
        if tensor.is_meta:
            continue
        if isinstance(tensor, DTensor):
            split.append(tensor.to_local())
            continue
        if tensor.device != device:
            tensor.data = tensor.data.to(device)
        whole.append(tensor)
    broadcast_together([tensor.data for tensor in whole])
    broadcast_together(split, data_group)
