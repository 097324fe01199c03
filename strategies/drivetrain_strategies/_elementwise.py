"""Which optimizers update each element by itself, so that they may step parts of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

_NAMES = ("ASGD", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
_ELEMENTWISE = frozenset(getattr(torch.optim, name) for name in _NAMES)


def is_elementwise(optimizer: Optimizer, declared: Sequence[Optimizer]) -> bool:
    """Return whether an optimizer updates each element by itself, so that it may step parts of the parameters.

    Args:
        optimizer: the optimizer. Of torch's optimizers, a subclass may override the update, so that its class counts
            only if it is exactly torch's.
        declared: the optimizers that ``configure_optimizers`` returned with ``"elementwise": True``.
    """
    return type(optimizer) in _ELEMENTWISE or any(other is optimizer for other in declared)
