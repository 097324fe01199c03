"""Sharded tensors of a state, whole on one rank: one at a time, through the host's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def gathered(state: Any, keep: bool) -> Any:
    """Return ``state`` with every sharded tensor whole on the CPU. Collective where there is one.

    No more than one whole tensor at a time is on any device; a tensor that stands in several places is gathered once.

    Args:
        state: nested mappings and sequences, laid out alike on every rank.
        keep: whether this rank wants the result; elsewhere empty tensors stand for what was gathered.
    """
    return _gathered(state, keep, {})


def _gathered(value: Any, keep: bool, known: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, Mapping):
        return {key: _gathered(child, keep, known) for key, child in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_gathered(child, keep, known) for child in value)
    # The attribute and not the class: importing DTensor takes long, and without it there is none.
    full = getattr(value, "full_tensor", None)
    if full is None:
        return value
    if id(value) not in known:
        whole = full()
        known[id(value)] = whole.cpu() if keep else torch.empty(0, dtype=value.dtype)
    return known[id(value)]
