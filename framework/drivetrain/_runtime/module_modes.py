"""A module's modes, kept: each child's ``training`` flag is put back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Within it the module is in eval mode and records nothing for a backward; every child's flag comes back."""
    flags = [(child, child.training) for child in module.modules()]
    try:
        module.eval()
        with torch.no_grad():
            yield
    finally:
        for child, training in flags:
            child.training = training
