"""Finds the random generators that loaders, samplers, data sets and transforms hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from drivetrain._data.combined import is_collection, leaves
from drivetrain._runtime.generators import is_generator

# Attributes by which loaders, samplers and data sets refer to each other.
_CHILD_ATTRIBUTES = ("sampler", "batch_sampler", "dataset", "loader", "collate_fn")
_CHILD_LISTS = ("datasets", "flattened")

# Maximum depth of plain objects that are searched, such as a composed transform and its parts.
_MAX_DEPTH = 2
# Maximum length of a collection whose entries are searched.
_MAX_ENTRIES = 32
# Number of objects after which no more plain objects are searched.
_MAX_OBJECTS = 4096

# Of objects whose class is in one of these packages, only the attributes listed above are searched.
_SKIPPED_PACKAGES = frozenset(
    {"builtins", "torch", "numpy", "drivetrain", "drivetrain_strategies", "threading", "logging"}
)


def collect_generators(*loaders: Any) -> list[Any]:
    """Return the generators that loaders and their samplers, data sets and ``collate_fn`` have as attributes.

    Plain objects among the attributes, such as transforms, are searched as well, two levels deep and through small
    collections. Modules, tensors and other data sets are not searched.

    Args:
        loaders: loaders, collections of loaders, or other objects, which are searched in the same way.
    """
    generators: dict[int, Any] = {}
    seen: set[int] = set()
    chain = deque((leaf, 0) for loader in loaders for leaf in (leaves(loader) if is_collection(loader) else [loader]))
    plain: deque[tuple[Any, int]] = deque()  # with their depths, the shallowest first
    while chain or (plain and len(seen) < _MAX_OBJECTS):
        part, depth = (chain or plain).popleft()
        if id(part) in seen:
            continue
        seen.add(id(part))
        attributes, bound = getattr(part, "__dict__", {}), _bound_objects(part)
        entries = [entry for value in (*attributes.values(), *bound) for entry in _entries(value)]
        generators.update({id(entry): entry for entry in entries if is_generator(entry)})
        if depth < _MAX_DEPTH and (depth or bound or not _is_skipped(part)):
            plain += [(entry, depth + 1) for entry in entries if _may_hold_generators(entry)]
        if depth == 0:
            chain += [(attributes[name], 0) for name in _CHILD_ATTRIBUTES if name in attributes]
            lists = (attributes.get(name) for name in _CHILD_LISTS)
            chain += [(child, 0) for children in lists if isinstance(children, list | tuple) for child in children]
    return list(generators.values())


def _bound_objects(value: Any) -> list[Any]:
    """Return the objects that a callable is bound to: a method's instance, or a partial's function and arguments."""
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    return [value.__self__] if isinstance(value, MethodType) else []


def _entries(value: Any) -> Iterator[Any]:
    """Yield ``value``, or its entries if it is a small collection. Yield nothing for a large collection."""
    if not isinstance(value, (list, tuple, dict)):
        yield value
    elif len(value) <= _MAX_ENTRIES:
        yield from value.values() if isinstance(value, dict) else value


def _may_hold_generators(value: Any) -> bool:
    """Return whether ``value`` is an object of user or library code that may hold generators."""
    if isinstance(value, partial | MethodType):
        return True
    if isinstance(value, type | FunctionType | ModuleType | Tensor | nn.Module | Dataset):
        return False
    return not _is_skipped(value) and hasattr(value, "__dict__")


def _is_skipped(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in _SKIPPED_PACKAGES
