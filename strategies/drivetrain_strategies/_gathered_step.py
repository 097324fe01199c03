"""Which optimizers are element-wise, and what the step of another one needs: whole parameters, gradients and state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from drivetrain.errors import ConfigurationError
from drivetrain.strategies import ParameterShard

logger = logging.getLogger("drivetrain")

_ELEMENTWISE = frozenset({ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop})


def is_elementwise(optimizer: Optimizer, declared: Sequence[Optimizer]) -> bool:
    """Return whether an optimizer updates each element by itself, so that it may step parts of the parameters.

    Args:
        optimizer: the optimizer. Of torch's optimizers, a subclass may override the update, so that its class counts
            only if it is exactly torch's.
        declared: the optimizers that ``configure_optimizers`` returned with ``"elementwise": True``.
    """
    return type(optimizer) in _ELEMENTWISE or any(other is optimizer for other in declared)


def announce(optimizer: Optimizer) -> None:
    """Log how an optimizer that is not known to be element-wise steps."""
    logger.info(
        "%s may not be element-wise: each step gathers its parameters, gradients and state on every rank. If its "
        "update of an element depends on that element alone, return {'optimizer': optimizer, 'elementwise': True} from "
        "configure_optimizers, which saves this memory and time.",
        type(optimizer).__name__,
    )


def check_fits(optimizer: Optimizer, nbytes: int, limit: int) -> None:
    """Refuse to gather more than ``limit`` bytes of parameters in each step.

    Raises:
        ConfigurationError: names the optimizer and both sizes.
    """
    if nbytes > limit:
        kind = type(optimizer).__name__
        raise ConfigurationError(
            f"{kind} holds {nbytes:,} bytes of sharded parameters, which is more than gather_limit={limit:,}.",
            f"{kind} may not be element-wise, so each of its steps gathers parameters, gradients and optimizer state "
            "on every rank.",
            "if its update of an element depends on that element alone, return {'optimizer': optimizer, 'elementwise': "
            "True} from configure_optimizers; otherwise raise FSDPStrategy(gather_limit=...).",
        )


def map_state(state: Any, parameter: Any, change: Callable[[Any], Any]) -> None:
    """Apply ``change`` to the tensors in a parameter's state. Containers stay the same objects where they can."""
    if parameter in state:
        changed = map_tensors(state[parameter], change)
        if isinstance(changed, dict):
            state[parameter].update(changed)
        else:
            state[parameter] = changed


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``change`` applied to its tensors and shards, also in dicts, lists and tuples.

    A container in which nothing changed is returned itself.
    """
    if isinstance(value, torch.Tensor | ParameterShard):
        return change(value)
    if isinstance(value, dict):
        changed = {key: map_tensors(part, change) for key, part in value.items()}
        return value if all(changed[key] is value[key] for key in value) else changed
    if isinstance(value, list | tuple):
        parts = [map_tensors(part, change) for part in value]
        return value if all(map(is_, parts, value)) else type(value)(parts)
    return value
