"""Generators of random numbers that loaders draw from besides the process's own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from drivetrain._runtime.generators import is_generator
from drivetrain.data.combined import is_collection, leaves

# What loaders, samplers and data sets keep each other by.
_PARTS = ("sampler", "batch_sampler", "dataset", "loader", "collate_fn")
_SEVERAL = ("datasets", "flattened")

# How far plain objects are followed: a data set's transform is one, and those that it is composed of are the next.
_DEPTH = 2
_ENTRIES = 32
_OBJECTS = 4096

# What the objects of these packages draw from is found by name, above.
_KNOWN = frozenset({"builtins", "torch", "numpy", "drivetrain", "drivetrain_strategies", "threading", "logging"})


def collect_generators(*loaders: Any) -> list[Any]:
    """Return the generators that the loaders, their samplers, data sets and ``collate_fn`` have as attributes.

    Plain objects among the attributes are looked at as well, two deep, through collections of a few: transforms, say.
    Modules, tensors and further data sets are not.

    Args:
        loaders: a loader each, or a collection of them; other objects are looked at likewise.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    deeper: list[tuple[Any, int]] = []
    waiting = [leaf for loader in loaders for leaf in (leaves(loader) if is_collection(loader) else [loader])]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        attributes = getattr(part, "__dict__", {})
        bound = _bound(part)
        values = [*attributes.values(), *bound]
        found.update({id(value): value for value in values if is_generator(value)})
        if bound or not _is_known(part):
            deeper += [(value, 1) for value in values]
        waiting += [attributes[name] for name in _PARTS if name in attributes]
        for name in _SEVERAL:
            several = attributes.get(name)
            waiting += several if isinstance(several, list | tuple) else ()
    most = len(seen) + _OBJECTS
    for value, depth in deeper:  # which grows meanwhile
        for one in _entries(value):
            if is_generator(one):
                found[id(one)] = one
            elif _is_plain(one) and id(one) not in seen and len(seen) < most:
                seen.add(id(one))
                inside = [*getattr(one, "__dict__", {}).values(), *_bound(one)]
                found.update({id(inner): inner for inner in inside if is_generator(inner)})
                if depth < _DEPTH:
                    deeper += [(inner, depth + 1) for inner in inside]
    return list(found.values())


def _bound(value: Any) -> list[Any]:
    """Return what a callable brings with it: a method its object, a partial its arguments."""
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    return [value.__self__] if isinstance(value, MethodType) else []


def _entries(value: Any) -> Iterator[Any]:
    """Yield a value, or those that a collection of a few holds."""
    if not isinstance(value, (list, tuple, dict)):
        yield value
    elif len(value) <= _ENTRIES:
        yield from value.values() if isinstance(value, dict) else value


def _is_plain(value: Any) -> bool:
    """Tell whether ``value`` is an object of the user's, or of a library's, that may have generators."""
    if isinstance(value, partial | MethodType):
        return True
    if isinstance(value, type | FunctionType | ModuleType | Tensor | nn.Module | Dataset):
        return False
    return not _is_known(value) and hasattr(value, "__dict__")


def _is_known(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in _KNOWN
