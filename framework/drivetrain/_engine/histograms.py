"""Histograms of distributed tensors: each rank counts the values it holds, and the counts are summed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import torch

from drivetrain._distributed.shards import ParameterShard
from drivetrain.errors import ConfigurationError
from drivetrain.loggers.media import EMPTY_RANGE, BinCounts, FlatValues, Histogram, ValueRange

if TYPE_CHECKING:
    from drivetrain._engine.run_parts import RunCore


def log_histograms(run: RunCore, name: str, value: Any, step: int, bins: int) -> None:
    """Implement `RunContext.log_histogram`. Collective: two exchanges of a few numbers per tensor.

    Raises:
        ConfigurationError: on every rank, if a value on any rank is not a tensor.
    """
    control = run.strategy.control
    given = {f"{name}/{key}": one for key, one in value.items()} if isinstance(value, Mapping) else {name: value}
    problem = next((f"{key}: a {type(one).__name__}" for key, one in given.items() if not _is_tensor(one)), None)
    numbers = {} if problem is not None else _local_numbers(run, given)
    reaches = {key: astuple(EMPTY_RANGE if one is None else one.reach) for key, one in numbers.items()}
    from_ranks = control.gather_objects([problem, {key: list(reach) for key, reach in reaches.items()}])
    if (invalid := next((one for one, _ in from_ranks if one is not None), None)) is not None:
        raise ConfigurationError(
            f"log_histogram takes tensors, and was given {invalid}.",
            "it counts a tensor's values.",
            "give a tensor, or tensors by name; None on ranks that hold no part of it.",
        )
    joined, counted = {}, {}
    for key in dict.fromkeys(key for _, each in from_ranks for key in each):  # all ranks' keys, in the same order
        joined[key] = ValueRange.joined([ValueRange(*each[key]) for _, each in from_ranks if key in each])
        held = numbers.get(key)
        if held is not None and not joined[key].is_empty:
            part = held.counted(joined[key].edges(bins))
            counted[key] = [part.counts, part.sum, part.sum_of_squares]
    parts = control.gather_objects(counted)
    if control.rank > 0 or run.evaluation.sanity_checking:
        return
    for key, reach in joined.items():
        if reach.is_empty:  # no finite value
            continue
        counts = [BinCounts(*each[key]) for each in parts if key in each]
        histogram = Histogram.joined(counts, reach.edges(bins), reach.left_out)
        for logger in run.trainer.loggers:
            logger.log_histogram(key, histogram, step)


def _is_tensor(value: Any) -> bool:
    return value is None or isinstance(value, torch.Tensor)


def _local_numbers(run: RunCore, given: Mapping[str, torch.Tensor | None]) -> dict[str, FlatValues | None]:
    """Return the part of each tensor that this rank counts; None for a tensor that other ranks count."""
    strategy = run.strategy
    names = {id(one): name for name, one in strategy.named_parameters().items()}
    of_module = {id(one) for one in (*run.module.parameters(), *run.module.buffers())}
    gradients = {id(one.grad) for one in run.module.parameters() if one.grad is not None}
    state: Mapping[str, Any] | None = None
    held: dict[str, FlatValues | None] = {}
    for key, tensor in given.items():
        part: Any = tensor
        belongs_to_module = id(tensor) in of_module or id(tensor) in gradients
        if id(tensor) in names:
            state = state or strategy.model_state()
            part = state.get(names[id(tensor)], tensor)
        if part is None:
            held[key] = None
            continue
        part = strategy.shard_of(part)
        if isinstance(part, ParameterShard):
            held[key] = FlatValues(part.local) if part.is_primary else None
        elif hasattr(part, "full_tensor"):
            raise ConfigurationError(
                f"log_histogram was given {key!r}, a DTensor that {type(strategy).__name__} did not shard.",
                "it cannot tell which part of it this rank holds.",
                "give tensor.full_tensor() on every rank.",
            )
        elif belongs_to_module and strategy.rank > 0:
            held[key] = None  # it is replicated, and rank 0 counts it
        else:
            held[key] = FlatValues(part)
    return held
