"""Histograms of distributed tensors: each rank counts the values it holds, and the counts are summed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from drivetrain._distributed.shards import ParameterShard
from drivetrain.errors import ConfigurationError
from drivetrain.loggers.media import FlatValues, Histogram, bin_edges

if TYPE_CHECKING:
    from drivetrain._engine.assembly.run_core import RunCore


def log_histograms(run: RunCore, name: str, value: Any, step: int, bins: int) -> None:
    """Implement `RunContext.log_histogram`. Collective: ranks exchange a few numbers per tensor, twice."""
    control = run.strategy.control
    tensors = {f"{name}/{key}": item for key, item in value.items()} if isinstance(value, Mapping) else {name: value}
    local = _local_values(run, tensors)
    from_ranks = control.gather_objects(
        {key: [math.inf, -math.inf] if values is None else [values.low, values.high] for key, values in local.items()}
    )
    edges, local_histograms = {}, {}
    for key in dict.fromkeys(chain.from_iterable(from_ranks)):  # the keys of all ranks, in the same order
        lows, highs = zip(*(each[key] for each in from_ranks if key in each), strict=True)
        if min(lows) > max(highs):  # no finite value
            continue
        edges[key] = bin_edges(min(lows), max(highs), bins)
        values = local.get(key)
        if values is not None:
            local_histograms[key] = astuple(values.counted(edges[key]))
    parts = control.gather_objects(local_histograms)
    if control.rank > 0 or run.sanity_checking:
        return
    for key in edges:
        histogram = Histogram.joined([Histogram(*each[key]) for each in parts if key in each])
        for logger in run.trainer.loggers:
            logger.log_histogram(key, histogram, step)


def _local_values(run: RunCore, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, FlatValues | None]:
    """Return the part of each tensor that this rank counts; None for a tensor that other ranks count."""
    strategy = run.strategy
    names = {id(parameter): name for name, parameter in strategy.named_parameters().items()}
    of_module = {id(tensor) for tensor in (*run.module.parameters(), *run.module.buffers())}
    gradients = {id(parameter.grad) for parameter in run.module.parameters() if parameter.grad is not None}
    state: Mapping[str, Any] | None = None
    values: dict[str, FlatValues | None] = {}
    for key, tensor in tensors.items():
        part: Any = tensor
        belongs_to_module = id(tensor) in of_module or id(tensor) in gradients
        if id(tensor) in names:
            state = state or strategy.model_state()
            part = state.get(names[id(tensor)], tensor)
        if part is None:
            values[key] = None
            continue
        part = strategy.shard_of(part)
        if isinstance(part, ParameterShard):
            values[key] = FlatValues(part.local) if part.is_primary else None
        elif hasattr(part, "full_tensor"):
            raise ConfigurationError(
                f"log_histogram was given {key!r}, a DTensor that {type(strategy).__name__} did not shard.",
                "log_histogram cannot determine which part of the tensor this rank holds.",
                "pass tensor.full_tensor() on every rank.",
            )
        elif belongs_to_module and strategy.rank > 0:
            values[key] = None  # rank 0 counts a replicated tensor
        else:
            values[key] = FlatValues(part)
    return values
