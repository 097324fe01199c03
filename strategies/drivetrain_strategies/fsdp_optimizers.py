"""Optimizers that were built before sharding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain_strategies.fsdp_state import like
from drivetrain_strategies.originals import Original


class Adoptions:
    """Gives optimizers over a module's original parameters the shards, and after the run the originals again.

    Args:
        originals: of the module, whose shards are in place.
    """

    def __init__(self, originals: Sequence[Original]) -> None:
        self._originals = originals
        self._successors = {id(original.parameter): original.current for original in originals}
        self._taken: list[Optimizer] = []

    def take(self, optimizers: Sequence[Optimizer]) -> None:
        """Replace originals, and cut their state to shards."""
        for optimizer in optimizers:
            if _replace(optimizer, self._successors, like):
                self._taken.append(optimizer)

    def give_back(self) -> None:
        """Once the originals are whole: replace the shards in what was taken, and gather their state. Collective."""
        whole = {
            id(self._successors[key]): original.parameter
            for key, original in zip(self._successors, self._originals, strict=True)
        }
        for optimizer in self._taken:
            _replace(optimizer, whole, like)
        self._taken = []


@torch.no_grad()
def _replace(optimizer: Optimizer, successors: dict[int, nn.Parameter], fit: Any) -> bool:
    """Put successors in the place of the parameters that have one, by identity; whether there were any."""
    found = False
    for group in optimizer.param_groups:
        for position, parameter in enumerate(group["params"]):
            successor = successors.get(id(parameter))
            if successor is None or successor is parameter:
                continue
            found = True
            group["params"][position] = successor
            if parameter in optimizer.state:
                values = optimizer.state.pop(parameter)
                optimizer.state[successor] = {
                    key: fit(value, successor)
                    if isinstance(value, torch.Tensor) and value.dim() and value.shape == successor.shape
                    else value
                    for key, value in values.items()
                }
    return found
