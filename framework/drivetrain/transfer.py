"""Batches on their way to the device: moving nested collections and counting samples."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import ConfigurationError


def move_to(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Move every tensor in ``batch`` to ``device``.

    Goes through tuples, named tuples, lists, mappings and dataclasses of any depth, and builds new ones of the same
    type. Whatever else has a ``to`` method (a Hugging Face ``BatchEncoding``, a ``PackedSequence``) moves itself. All
    other values stay as they are.

    Args:
        batch: the batch as the loader gave it.
        device: where to.
        non_blocking: do not wait for copies from pinned memory.

    Returns:
        The batch on the device; tensors that were there already are the same objects.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=non_blocking)
        # An object that moves itself in place and returns nothing is meant well.
        here = value.to(device)
        return value if here is None else here

    return map_tensors(batch, moved)


def map_tensors(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to every tensor in ``batch``, and to whatever else has a ``to`` method.

    `lightning_utilities.apply_to_collection` does much the same, but refuses frozen dataclasses, and this is called
    for every batch: a dict within a dict takes 5 Python calls here and 21 there.
    """
    kind = type(batch)
    if kind is Tensor:
        return function(batch)
    if kind is list or kind is tuple:
        values = []
        for value in batch:
            values.append(function(value) if type(value) is Tensor else map_tensors(value, function))
        return values if kind is list else tuple(values)
    if kind is dict:
        entries = {}
        for key, value in batch.items():
            entries[key] = function(value) if type(value) is Tensor else map_tensors(value, function)
        return entries
    if kind in (str, bytes, int, float, bool, type(None)):
        return batch
    return _map_other(batch, function)


def _map_other(batch: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(batch, Tensor) or (callable(getattr(batch, "to", None)) and not isinstance(batch, type)):
        return function(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        result = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                # Past the class's own `__setattr__`: a frozen dataclass is copied, not changed.
                object.__setattr__(result, field.name, map_tensors(getattr(batch, field.name), function))
        return result
    if isinstance(batch, Mapping):
        entries = OrderedDict((key, map_tensors(value, function)) for key, value in batch.items())
        if isinstance(batch, defaultdict):
            return type(batch)(batch.default_factory, entries)
        return type(batch)(entries)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes | range):
        return type(batch)([map_tensors(value, function) for value in batch])  # type: ignore[call-arg]
    return batch


def first_dimension(batch: Any) -> int:
    """Return the first dimension of the first tensor in ``batch``, depth first; 1 for a tensor without dimensions.

    Raises:
        ConfigurationError: there is no tensor in it.
    """
    tensor = first_tensor(batch)
    if tensor is None:
        raise ConfigurationError(
            f"a batch of type {type(batch).__name__} holds no tensor, so its samples cannot be counted",
            "the size of a batch is the first dimension of the first tensor found in it",
            "override `batch_weight(batch)` in the module, and pass `batch_size=` to `self.log`",
        )
    return tensor.shape[0] if tensor.dim() else 1


def first_tensor(batch: Any) -> Tensor | None:
    """Return the first tensor in ``batch``, depth first."""
    if isinstance(batch, Tensor):
        return batch
    for value in _parts(batch):
        found = first_tensor(value)
        if found is not None:
            return found
    return None


def _parts(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        return iter(batch.values())
    if isinstance(batch, tuple | list):
        return iter(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return iter([getattr(batch, field.name, None) for field in dataclasses.fields(batch)])
    if hasattr(batch, "data") and isinstance(getattr(batch, "data", None), Mapping):
        return iter(batch.data.values())
    return iter(())
