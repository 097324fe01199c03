"""Locks a module during a run: only its strategy may move or cast it, since new parameters would not be trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

# The attribute that `TrainModule._apply` reads. Setting it in `__dict__` bypasses `nn.Module.__setattr__`.
_HELD = "_held"


def hold(module: nn.Module) -> None:
    """Lock ``module``, so that it refuses to be moved or cast until `release`."""
    module.__dict__[_HELD] = True


def release(module: nn.Module) -> None:
    """Allow the module to be moved and cast again."""
    module.__dict__.pop(_HELD, None)


@contextmanager
def may_move(module: nn.Module) -> Iterator[None]:
    """Allow the strategy to move or cast a locked module within this context."""
    was_locked = module.__dict__.get(_HELD, False)
    release(module)
    try:
        yield
    finally:
        if was_locked:
            hold(module)
