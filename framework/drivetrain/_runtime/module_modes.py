"""Puts a module into eval mode for a while, and restores the ``training`` flags of the module and its children."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Put the module into eval mode without gradients, and restore all ``training`` flags on exit."""
    training_flags = [(child, child.training) for child in module.modules()]
    try:
        module.eval()
        with torch.no_grad():
            yield
    finally:
        for child, training in training_flags:
            child.training = training
