"""Copies batches that are used again after their step, or after the loader has yielded the next batch.

A step may modify its batch (``batch.pop("y")``), and a loader may write the next batch into the same memory.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, MutableMapping
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor

CopyLeaf = Callable[[Any], Any]


def copy_containers(batch: Any) -> Any:
    """Return the batch with its containers copied and its tensors shared."""
    return _rebuild(batch, _keep)


def copy_batch(batch: Any) -> Any:
    """Return the batch with its containers, tensors and arrays copied."""
    return _rebuild(batch, _copy)


def copy_pinned_tensors(batch: Any) -> Any:
    """Return the batch with copies of those tensors that a device may still be reading.

    Pinned CPU tensors are copied, because an asynchronous transfer may read them, and so are tensors on a device.
    """
    return _rebuild(batch, _copy_if_pinned_or_on_device)


def _keep(value: Any) -> Any:
    return value


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value.copy()


def _copy_if_pinned_or_on_device(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.device.type == "cpu" and value.layout == torch.strided and value.is_pinned():
        return torch.empty_like(value, pin_memory=True).copy_(value)
    return _copy(value) if value.device.type != "cpu" else value


def _rebuild(batch: Any, copy_leaf: CopyLeaf) -> Any:
    kind = type(batch)
    if kind is dict:
        return {key: _rebuild(value, copy_leaf) for key, value in batch.items()}
    if kind is list:
        return [_rebuild(value, copy_leaf) for value in batch]
    if kind is tuple:
        return tuple(_rebuild(value, copy_leaf) for value in batch)
    if kind in (str, bytes, int, float, bool, type(None)):
        return batch
    if isinstance(batch, Tensor) or _is_array(batch):
        return copy_leaf(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return kind(*(_rebuild(value, copy_leaf) for value in batch))
    return _rebuild_object(batch, copy_leaf)


def _rebuild_object(batch: Any, copy_leaf: CopyLeaf) -> Any:
    """Copy an object and its values, for example a dataclass or a Hugging Face ``BatchEncoding``."""
    try:
        if callable(getattr(batch, "clone", None)):  # A TensorDict or a graph copies its tensors itself.
            return batch.clone()
        result = copy.copy(batch)
    except Exception:  # The class does not support copying.
        return batch
    if result is batch:
        return batch
    if isinstance(result, MutableMapping):
        for key in [*result]:
            result[key] = _rebuild(result[key], copy_leaf)
    elif isinstance(result, list):
        result[:] = [_rebuild(value, copy_leaf) for value in result]
    else:
        for name, value in getattr(result, "__dict__", {}).items():
            # `object.__setattr__` also works on the copy of a frozen dataclass.
            object.__setattr__(result, name, _rebuild(value, copy_leaf))
        for slot in _slots(type(result)):
            with contextlib.suppress(AttributeError):  # The slot is unset.
                slot.__set__(result, _rebuild(slot.__get__(result), copy_leaf))
    return result


def _slots(kind: type) -> list[MemberDescriptorType]:
    """Return the slot descriptors of a class and its bases.

    The slots are read from ``vars``, because a property may shadow a slot, as in ``pathlib`` of Python 3.13.
    """
    classes = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [slot for names in classes for slot in names.values() if isinstance(slot, MemberDescriptorType)]


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)
