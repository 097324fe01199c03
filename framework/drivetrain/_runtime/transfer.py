"""Batches on their way to the device: moving and casting nested collections, and counting samples."""

from __future__ import annotations

import copy
import dataclasses
from array import array
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

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


def cast_floating(batch: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor in ``batch`` to ``dtype``; integers and complex numbers stay.

    Goes where `move_to` goes, and into what moves itself as well: a Hugging Face ``BatchEncoding``, a dataclass with a
    ``to`` of its own, a ``TensorDict``, a ``PackedSequence``. Of other classes nothing is known, and they stay.

    Returns:
        The batch with new tensors; those that have the dtype already are the same objects.
    """

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, PackedSequence):
            return value.to(dtype) if value.data.is_floating_point() else value
        if isinstance(value, nn.Module):
            return value
        if _batch_size(value) is not None and callable(getattr(value, "apply", None)):
            return value.apply(cast)  # a TensorDict, whose `to` would cast integers as well
        return _rebuilt(value, cast)

    return map_tensors(batch, cast)


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
    return _rebuilt(batch, function)


def _rebuilt(batch: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(batch, UserDict) or (isinstance(batch, MutableMapping) and dataclasses.is_dataclass(batch)):
        # A copy, with what else the object holds. One of Hugging Face's outputs keeps its fields and its entries alike.
        result: Any = copy.copy(batch)
        for key, value in batch.items():
            result[key] = map_tensors(value, function)
        return result
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
    # Buffers of bytes or numbers hold no tensor.
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes | range | bytearray | memoryview | array):
        return type(batch)([map_tensors(value, function) for value in batch])  # type: ignore[call-arg]
    return batch


def row_major(tensor: Tensor) -> Tensor:
    """Return the elements in row-major order, of shape (n,) and stride 1; a view where they lie so.

    ``contiguous`` does not see to that: it leaves a single element the stride that it had, and the bytes of such a one
    cannot be viewed.
    """
    flat = tensor.reshape(-1)
    return flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)


def first_dimension(batch: Any) -> int:
    """Return the first dimension of the first tensor in ``batch``, depth first; 1 for a tensor without dimensions.

    A ``PackedSequence`` counts its sequences, a ``TensorDict`` the first number of its batch size.

    Raises:
        ConfigurationError: there is no tensor in it.
    """
    samples = samples_in(batch)
    if samples is None:
        raise ConfigurationError(
            f"a batch of type {type(batch).__name__} holds no tensor, so its samples cannot be counted",
            "the size of a batch is the first dimension of the first tensor found in it",
            "override `batch_weight(batch)` in the module, and pass `batch_size=` to `self.log`",
        )
    return samples


def samples_in(batch: Any) -> int | None:
    """Return what `first_dimension` returns; None where there is no tensor in ``batch``."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    if isinstance(batch, PackedSequence):  # whose first tensor holds the steps of all sequences
        return int(batch.batch_sizes[0])
    size = _batch_size(batch)
    if size:
        return size[0]
    for value in _parts(batch):
        found = samples_in(value)
        if found is not None:
            return found
    return None


def _batch_size(value: Any) -> torch.Size | None:
    """Return the batch size of a ``TensorDict`` or a tensor class; None for everything else."""
    size = getattr(value, "batch_size", None)
    return size if isinstance(size, torch.Size) else None


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
