"""Lets optimizers that were built before sharding step the shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.errors import ConfigurationError
from drivetrain_strategies.fsdp._original_parameters import Original
from drivetrain_strategies.fsdp._state import state_in_layout_of


class AdoptedOptimizers:
    """Replaces the original parameters in optimizers by shards, and restores the original parameters after the run.

    Args:
        originals: the module's original parameters, which shards have already replaced in the module.
    """

    def __init__(self, originals: Sequence[Original]) -> None:
        self._originals = originals
        self._successors = {id(original.parameter): original.current for original in originals}
        self._optimizers: list[Optimizer] = []

    def adopt(self, optimizers: Sequence[Optimizer]) -> None:
        """Replace the original parameters in ``optimizers`` by shards, and shard the optimizers' state.

        Raises:
            ConfigurationError: an optimizer holds shards that do not belong to the module.
        """
        for optimizer in optimizers:
            if _replace(optimizer, self._successors):
                self._optimizers.append(optimizer)
            self._refuse_other_shards(optimizer)

    def restore(self) -> None:
        """Replace the shards by the original parameters, which are whole again, and gather the state. Collective."""
        originals_by_shard_id = {
            id(self._successors[key]): original.parameter
            for key, original in zip(self._successors, self._originals, strict=True)
        }
        for optimizer in self._optimizers:
            _replace(optimizer, originals_by_shard_id)
        self._optimizers = []

    def _refuse_other_shards(self, optimizer: Optimizer) -> None:
        shard_ids = {id(parameter) for parameter in self._successors.values()}
        for parameter in (member for group in optimizer.param_groups for member in group["params"]):
            if isinstance(parameter, DTensor) and id(parameter) not in shard_ids:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} holds a shard of shape {tuple(parameter.shape)} that does not belong "
                    "to the module.",
                    "parameters are sharded again in every run, and shards of an earlier run are no longer used.",
                    "build a new optimizer in every call of configure_optimizers, or build it once in the module's "
                    "__init__.",
                )


@torch.no_grad()
def _replace(optimizer: Optimizer, successors: dict[int, nn.Parameter]) -> bool:
    """Replace each parameter whose ``id`` is in ``successors``. Return whether any parameter was replaced."""
    replaced = False
    for group in optimizer.param_groups:
        for position, parameter in enumerate(group["params"]):
            successor = successors.get(id(parameter))
            if successor is None or successor is parameter:
                continue
            replaced = True
            group["params"][position] = successor
            if parameter in optimizer.state:
                optimizer.state[successor] = state_in_layout_of(successor, optimizer.state.pop(parameter))
    return replaced
