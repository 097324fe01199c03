"""`torchmetrics.Metric` objects: recognised, computed over ranks, and their state kept."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch

from drivetrain.errors import ConfigurationError


def is_metric(value: Any) -> bool:
    """Whether ``value`` is a `torchmetrics.Metric`."""
    # Whoever holds a metric has imported torchmetrics; nobody else pays for it.
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def metric_state(metric: Any) -> dict[str, Any]:
    """Return a copy of the states that a metric declares with add_state, and of what it keeps about them."""
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    return {name: copy.deepcopy(getattr(metric, name)) for name in names if name in metric.__dict__}


def set_metric_state(metric: Any, state: Mapping[str, Any]) -> None:
    """Put back what `metric_state` returned."""
    metric.__dict__.update(state)


def merge_metric_state(metric: Any, state: Mapping[str, Any]) -> None:
    """Add what another rank's object of this kind had seen, in the way in which ``compute`` brings ranks together."""
    for name, reduction in metric._reductions.items():
        mine, theirs = getattr(metric, name), state[name]
        if isinstance(mine, list):
            setattr(metric, name, [*mine, *theirs])
        elif reduction is not None:
            setattr(metric, name, reduction(torch.stack([mine, theirs])))
    metric._update_count += state["_update_count"]
    metric._computed = None


def computed(name: str, metric: Any, together: bool, group: Any) -> torch.Tensor:
    """Return the number that a metric logged as ``name`` computes.

    Args:
        name: for the error.
        metric: the object.
        together: over all ranks; collective then.
        group: the ranks, where the metric names none itself; None for all.

    Raises:
        ConfigurationError: it computes something else.
    """
    before = metric.sync_on_compute, metric.process_group
    metric.sync_on_compute = together
    metric.process_group = metric.process_group or group
    try:
        value = metric.compute()
    finally:
        metric.sync_on_compute, metric.process_group = before
    if isinstance(value, int | float):
        value = torch.tensor(value)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise ConfigurationError(
            f"log({name!r}) was given a {type(metric).__name__}, which computes {found}.",
            "a logged value is one number.",
            "compute it in on_train_epoch_end or on_validation_epoch_end, and log its elements one at a time.",
        )
    return value.detach().reshape(()).cpu()
