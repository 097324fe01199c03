"""Puts a module into eval mode, and restores the ``training`` flag of each child."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Put the module into eval mode without gradients, and restore every child's ``training`` flag on exit."""
    flags = [(child, child.training) for child in module.modules()]
    try:
        module.eval()
        with torch.no_grad():
            yield
    finally:
        for child, training in flags:
            child.training = training
