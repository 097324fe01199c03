"""Copies of batches that are kept for later: a step may take a batch apart, a loader write the next one over it."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, MutableMapping
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor

Values = Callable[[Any], Any]


def copy_containers(batch: Any) -> Any:
    """A batch of the same tensors in containers of its own, which may be spoiled (``batch.pop("y")``)."""
    return _rebuilt(batch, _same)


def copy_batch(batch: Any) -> Any:
    """A batch that stays as it is whatever is written to the memory of this one: tensors and arrays are copied."""
    return _rebuilt(batch, _copied)


def copy_pinned_tensors(batch: Any) -> Any:
    """`copy_batch` for those tensors alone that a device may still read when a copy to it has been started."""
    return _rebuilt(batch, _copied_where_read_later)


def _same(value: Any) -> Any:
    return value


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value.copy()


def _copied_where_read_later(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.device.type == "cpu" and value.layout == torch.strided and value.is_pinned():
        return torch.empty_like(value, pin_memory=True).copy_(value)
    return _copied(value) if value.device.type != "cpu" else value


def _rebuilt(batch: Any, values: Values) -> Any:
    kind = type(batch)
    if kind is dict:
        return {key: _rebuilt(value, values) for key, value in batch.items()}
    if kind is list:
        return [_rebuilt(value, values) for value in batch]
    if kind is tuple:
        return tuple(_rebuilt(value, values) for value in batch)
    if kind in (str, bytes, int, float, bool, type(None)):
        return batch
    if isinstance(batch, Tensor) or _is_array(batch):
        return values(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return kind(*(_rebuilt(value, values) for value in batch))
    return _rebuilt_object(batch, values)


def _rebuilt_object(batch: Any, values: Values) -> Any:
    """Copy an object as its class wants it, and then what it holds: a dataclass, a Hugging Face ``BatchEncoding``."""
    try:
        if callable(getattr(batch, "clone", None)):  # a TensorDict, a graph: whole, tensors included
            return batch.clone()
        result = copy.copy(batch)
    except Exception:  # a class that refuses: it is handed on as it is
        return batch
    if result is batch:
        return batch
    if isinstance(result, MutableMapping):
        for key in [*result]:
            result[key] = _rebuilt(result[key], values)
    elif isinstance(result, list):
        result[:] = [_rebuilt(value, values) for value in result]
    else:
        for name, value in getattr(result, "__dict__", {}).items():
            # Past the class's own `__setattr__`: a frozen dataclass is copied, not changed.
            object.__setattr__(result, name, _rebuilt(value, values))
        for slot in _slots(type(result)):
            with contextlib.suppress(AttributeError):  # one that is empty
                slot.__set__(result, _rebuilt(slot.__get__(result), values))
    return result


def _slots(kind: type) -> list[MemberDescriptorType]:
    """The slots of a class and its bases, past properties of the same names: Python 3.13's paths have one."""
    classes = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [slot for names in classes for slot in names.values() if isinstance(slot, MemberDescriptorType)]


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)
