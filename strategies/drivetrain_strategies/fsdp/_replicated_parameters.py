"""Averages the gradients of parameters that are replicated in a sharded run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from drivetrain.strategies import average_together


class ReplicatedParameters:
    """Averages the gradients of ignored parameters and scalars, in one collective per dtype.

    Args:
        parameters: replicated parameters, in the same order on every rank.
        group: the process group of the ranks that read different data.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Any) -> None:
        self._parameters = list(parameters)
        self._group = group

    @torch.no_grad()
    def average(self) -> None:
        """Average the accumulated gradients. A parameter that no rank used keeps no gradient. Collective."""
        parameters = [parameter for parameter in self._parameters if parameter.requires_grad]
        if not parameters:
            return
        unused = [number for number, parameter in enumerate(parameters) if parameter.grad is None]
        used = parameters[0].new_ones(len(parameters))  # created on the device, since a copy from the host would block
        for number in unused:
            used[number].zero_()
            parameters[number].grad = torch.zeros_like(parameters[number])
        average_together(
            [*(parameter.grad for parameter in parameters if parameter.grad is not None), used], self._group
        )
        if unused:  # reading the flags waits for the device
            used_anywhere = used.tolist()
            for number in unused:
                if not used_anywhere[number]:
                    parameters[number].grad = None
