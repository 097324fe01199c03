"""A module that a run holds: nobody but its strategy moves or re-casts it, for new parameters would stop training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

# `TrainModule._apply` asks for it. A key of the instance's own dictionary: nn.Module.__setattr__ is not for this.
_HELD = "_held"


def hold(module: nn.Module) -> None:
    """Refuse from here on, until `release`, that somebody moves or re-casts ``module``."""
    module.__dict__[_HELD] = True


def release(module: nn.Module) -> None:
    """Let the module be moved again."""
    module.__dict__.pop(_HELD, None)


@contextmanager
def may_move(module: nn.Module) -> Iterator[None]:
    """Within it the strategy may move or re-cast a module that the run holds."""
    held = module.__dict__.get(_HELD, False)
    release(module)
    try:
        yield
    finally:
        if held:
            hold(module)
