"""Moves and casts batches, which are nested collections of tensors, and counts their samples."""

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

    Recurses into tuples, named tuples, lists, mappings and dataclasses, and builds new objects of the same type. Other
    objects with a ``to`` method (a Hugging Face ``BatchEncoding``, a ``PackedSequence``) move themselves. All other
    values are returned unchanged.

    Args:
        batch: the batch from the loader.
        device: the target device.
        non_blocking: do not wait for copies from pinned memory.

    Returns:
        The batch on the device. Tensors that were already on the device are the same objects.
    """

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=non_blocking)
        # A method `to` that works in place may return None.
        moved = value.to(device)
        return value if moved is None else moved

    return map_tensors(batch, move)


def cast_floating(batch: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor in ``batch`` to ``dtype``. Integer and complex tensors do not change.

    Recurses as `move_to` does, and also into objects with a ``to`` method: a Hugging Face ``BatchEncoding``, a
    dataclass, a ``TensorDict``, a ``PackedSequence``. Objects of unknown classes stay as they are.

    Returns:
        The batch with new tensors. Tensors that already have the dtype are the same objects.
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
        return _rebuild(value, cast)

    return map_tensors(batch, cast)


def map_tensors(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to every tensor in ``batch``, and to other objects with a ``to`` method.

    This function runs for every batch, so it makes few Python calls: 5 for a nested dict. `apply_to_collection` of
    lightning_utilities makes 21 for the same dict, and refuses frozen dataclasses.
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
    return _rebuild(batch, function)


def _rebuild(batch: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(batch, UserDict) or (isinstance(batch, MutableMapping) and dataclasses.is_dataclass(batch)):
        # The copy keeps the other attributes of the object. Hugging Face's `ModelOutput` updates its fields whenever an
        # entry is assigned.
        result: Any = copy.copy(batch)
        for key, value in batch.items():
            result[key] = map_tensors(value, function)
        return result
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        result = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                # `object.__setattr__` is called because a frozen dataclass refuses assignments.
                object.__setattr__(result, field.name, map_tensors(getattr(batch, field.name), function))
        return result
    if isinstance(batch, Mapping):
        entries = OrderedDict((key, map_tensors(value, function)) for key, value in batch.items())
        if isinstance(batch, defaultdict):
            return type(batch)(batch.default_factory, entries)
        return type(batch)(entries)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    # Buffers of bytes or numbers contain no tensors.
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes | range | bytearray | memoryview | array):
        return type(batch)([map_tensors(value, function) for value in batch])  # type: ignore[call-arg]
    return batch


def row_major(tensor: Tensor) -> Tensor:
    """Return the elements in row-major order, of shape (n,) and stride 1. The result is a view if possible.

    ``contiguous`` is not enough, because it keeps any stride of a tensor with a single element, and the bytes of a
    tensor with another stride than 1 cannot be viewed.
    """
    flat = tensor.reshape(-1)
    return flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)


def first_dimension(batch: Any) -> int:
    """Return the first dimension of the first tensor in ``batch``, depth first. A tensor of shape () counts as 1.

    A ``PackedSequence`` counts as its number of sequences, and a ``TensorDict`` as the first number of its batch size.

    Raises:
        ConfigurationError: there is no tensor in ``batch``.
    """
    samples = samples_in(batch)
    if samples is None:
        raise ConfigurationError(
            f"a batch of type {type(batch).__name__} holds no tensor, so its samples cannot be counted",
            "the size of a batch is the first dimension of the first tensor in it",
            "override `batch_weight(batch)` in the module, and pass `batch_size=` to `self.log`",
        )
    return samples


def samples_in(batch: Any) -> int | None:
    """Return the result of `first_dimension`, or None if there is no tensor in ``batch``."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    if isinstance(batch, PackedSequence):  # the first tensor of a PackedSequence holds the time steps of all sequences
        return int(batch.batch_sizes[0])
    size = _batch_size(batch)
    if size:
        return size[0]
    for value in _parts(batch):
        samples = samples_in(value)
        if samples is not None:
            return samples
    return None


def _batch_size(value: Any) -> torch.Size | None:
    """Return the batch size of a ``TensorDict`` or a tensor class, and None for other objects."""
    size = getattr(value, "batch_size", None)
    return size if isinstance(size, torch.Size) else None


def _parts(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        return iter(batch.values())
    if isinstance(batch, tuple | list):
        return iter(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return iter([getattr(batch, field.name, None) for field in dataclasses.fields(batch)])
    return iter(())
