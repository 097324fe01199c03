"""Optimizers that were built before sharding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.errors import ConfigurationError
from drivetrain_strategies.fsdp._original_parameters import Original
from drivetrain_strategies.fsdp._state import like


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
        """Replace originals, and cut their state to shards.

        Raises:
            ConfigurationError: an optimizer is over shards that are no longer, or not yet, the module's.
        """
        for optimizer in optimizers:
            if _replace(optimizer, self._successors, like):
                self._taken.append(optimizer)
            self._refuse_other_shards(optimizer)

    def give_back(self) -> None:
        """Once the originals are whole: replace the shards in what was taken, and gather their state. Collective."""
        whole = {
            id(self._successors[key]): original.parameter
            for key, original in zip(self._successors, self._originals, strict=True)
        }
        for optimizer in self._taken:
            _replace(optimizer, whole, like)
        self._taken = []

    def _refuse_other_shards(self, optimizer: Optimizer) -> None:
        own = {id(parameter) for parameter in self._successors.values()}
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if isinstance(parameter, DTensor) and id(parameter) not in own:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} holds a shard of shape {tuple(parameter.shape)} that is not the "
                    "module's.",
                    "parameters are sharded anew in every run, and those of an earlier one are nobody's.",
                    "build it anew in each configure_optimizers, or once before the first run (in __init__).",
                )


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
