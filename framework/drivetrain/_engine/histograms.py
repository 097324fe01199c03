"""Histograms of tensors that are spread over ranks: each rank counts what it holds, and the counts are summed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import torch

from drivetrain._distributed.shards import ParameterShard
from drivetrain.errors import ConfigurationError
from drivetrain.loggers.media import EMPTY_RANGE, BinCounts, FlatValues, Histogram, ValueRange

if TYPE_CHECKING:
    from drivetrain._engine.session_state import SessionState


def log_histograms(run: SessionState, name: str, value: Any, step: int, bins: int) -> None:
    """Do as `RunContext.log_histogram` says. Collective: two exchanges of a few numbers a tensor.

    Raises:
        ConfigurationError: on every rank, if a rank gave what is no tensor.
    """
    control = run.strategy.control
    given = {f"{name}/{key}": one for key, one in value.items()} if isinstance(value, Mapping) else {name: value}
    problem = next((f"{key}: a {type(one).__name__}" for key, one in given.items() if not _is_tensor(one)), None)
    numbers = {} if problem is not None else _held(run, given)
    reaches = {key: astuple(EMPTY_RANGE if one is None else one.reach) for key, one in numbers.items()}
    told = control.gather_objects([problem, {key: list(reach) for key, reach in reaches.items()}])
    if (found := next((one for one, _ in told if one is not None), None)) is not None:
        raise ConfigurationError(
            f"log_histogram was given what is no tensor, {found}.",
            "it counts a tensor's numbers.",
            "give a tensor, or tensors by name; None where a rank has nothing of it.",
        )
    joined, counted = {}, {}
    for key in dict.fromkeys(key for _, each in told for key in each):  # of all ranks, in one order
        joined[key] = ValueRange.joined([ValueRange(*each[key]) for _, each in told if key in each])
        one = numbers.get(key)
        if one is not None and not joined[key].is_empty:
            part = one.counted(joined[key].edges(bins))
            counted[key] = [part.counts, part.sum, part.sum_of_squares]
    parts = control.gather_objects(counted)
    if control.rank > 0 or run.sanity_checking:
        return
    for key, reach in joined.items():
        if reach.is_empty:  # nothing in it is finite
            continue
        own = [BinCounts(*each[key]) for each in parts if key in each]
        histogram = Histogram.joined(own, reach.edges(bins), reach.left_out)
        for logger in run.trainer.loggers:
            logger.log_histogram(key, histogram, step)


def _is_tensor(value: Any) -> bool:
    return value is None or isinstance(value, torch.Tensor)


def _held(run: SessionState, given: Mapping[str, torch.Tensor | None]) -> dict[str, FlatValues | None]:
    """What this rank is to count of each tensor."""
    strategy = run.strategy
    names = {id(one): name for name, one in strategy.named_parameters().items()}
    of_module = {id(one) for one in (*run.module.parameters(), *run.module.buffers())}
    gradients = {id(one.grad) for one in run.module.parameters() if one.grad is not None}
    state: Mapping[str, Any] | None = None
    held: dict[str, FlatValues | None] = {}
    for key, tensor in given.items():
        part: Any = tensor
        is_models = id(tensor) in of_module or id(tensor) in gradients
        if id(tensor) in names:
            state = state or strategy.model_state()
            part = state.get(names[id(tensor)], tensor)
        if part is None:
            held[key] = None
            continue
        part = strategy.shard_of(part)
        if isinstance(part, ParameterShard):
            held[key] = FlatValues(part.local) if part.speaks else None
        elif hasattr(part, "full_tensor"):
            raise ConfigurationError(
                f"log_histogram was given {key!r}, spread over ranks as {type(strategy).__name__} does not know it.",
                "it cannot tell what this rank holds of it.",
                "give tensor.full_tensor() on every rank.",
            )
        elif is_models and strategy.rank > 0:
            held[key] = None  # every rank has all of it
        else:
            held[key] = FlatValues(part)
    return held
