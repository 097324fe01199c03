"""All ranks start from rank 0's values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from drivetrain.strategies import broadcast_together


def start_alike(tensors: Iterable[torch.Tensor], device: torch.device, data_group: Any = None) -> None:
    """Bring tensors to ``device`` and give them rank 0's values, in one broadcast a dtype. Collective.

    What has no storage yet is left alone. Of what tensor parallelism has split already, each part is given out over
    ``data_group``, by its first rank.
    """
    given: list[Any] = []
    split: list[Any] = []
    for tensor in tensors:
        if tensor.is_meta:
            continue
        if isinstance(tensor, DTensor):
            split.append(tensor.to_local())
            continue
        if tensor.device != device:
            tensor.data = tensor.data.to(device)
        given.append(tensor)
    broadcast_together([tensor.data for tensor in given])
    broadcast_together(split, data_group)
