"""Averages the gradients of parameters that are replicated in a sharded run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class ReplicatedParameters:
    """Averages the gradients of ignored parameters and scalars, in one collective per dtype.

    Args:
        parameters: replicated parameters, in the same order on every rank.
        group: the process group of the ranks that read different data.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Any) -> None:
        self._parameters = list(parameters)
        self._group = group
        self._ranks = dist.get_world_size(group)

    @torch.no_grad()
    def average(self) -> None:
        """Average the accumulated gradients. A parameter that no rank used keeps no gradient. Collective."""
        parameters_by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._parameters:
            if parameter.requires_grad:
                parameters_by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in parameters_by_dtype.values():
            parts = [
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters
            ]
            unused = [index for index, parameter in enumerate(parameters) if parameter.grad is None]
            used = parts[0].new_ones(len(parameters))  # created on the device, since a copy from the host would block
            for index in unused:
                used[index].zero_()
            packed = torch.cat([*(part.reshape(-1) for part in parts), used])
            dist.all_reduce(packed, group=self._group)
            # Reading the flags waits for the device, so they are not read if this rank used all parameters.
            used_flags = [True] * len(parameters) if not unused else (packed[-len(parameters) :] > 0).tolist()
            packed /= self._ranks
            offset = 0
            for parameter, used_anywhere in zip(parameters, used_flags, strict=True):
                if used_anywhere:
                    mean = packed[offset : offset + parameter.numel()].view_as(parameter)
                    if parameter.grad is None:
                        parameter.grad = mean.clone()
                    else:
                        parameter.grad.copy_(mean)
                offset += parameter.numel()
