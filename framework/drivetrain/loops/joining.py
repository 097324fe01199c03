"""Micro-batches that must leave no trace: a rank without data keeps the others company."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from drivetrain.metrics.store import MetricStore, is_metric


@contextmanager
def without_gradient(module: nn.Module) -> Iterator[None]:
    """Within it a backward adds exactly zero to every parameter's gradient, even where the loss is NaN.

    Multiplying the loss by zero would not do: the mean over no items is NaN, and NaN times zero is NaN.
    """
    handles = [
        parameter.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
        for parameter in module.parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def leaving_no_trace(module: nn.Module, metrics: MetricStore) -> Iterator[None]:
    """Within it nothing is logged, and afterwards buffers and metric objects are as before."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    states = [(child, _state_of(child)) for child in module.modules() if is_metric(child)]
    metrics.muted = True
    try:
        yield
    finally:
        metrics.muted = False
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for metric, state in states:
            metric.__dict__.update(state)


def _state_of(metric: Any) -> dict[str, Any]:
    # The states a metric declares with add_state, and what it keeps about them.
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    return {name: copy.deepcopy(getattr(metric, name)) for name in names if name in metric.__dict__}
