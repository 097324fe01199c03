"""Locks a module during a run: only the strategy may move or cast the module.

After a move by the user, the optimizers would still hold the old parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

# The attribute that `TrainModule._apply` reads. Setting it in `__dict__` bypasses `nn.Module.__setattr__`.
_LOCK_ATTRIBUTE = "_is_locked"


def lock_module(module: nn.Module) -> None:
    """Lock ``module``, so that it refuses to be moved or cast until `unlock_module`."""
    module.__dict__[_LOCK_ATTRIBUTE] = True


def unlock_module(module: nn.Module) -> None:
    """Allow the module to be moved and cast again."""
    module.__dict__.pop(_LOCK_ATTRIBUTE, None)


@contextmanager
def may_move(module: nn.Module) -> Iterator[None]:
    """Allow the strategy to move or cast a locked module within this context."""
    was_locked = module.__dict__.get(_LOCK_ATTRIBUTE, False)
    unlock_module(module)
    try:
        yield
    finally:
        if was_locked:
            lock_module(module)
