"""Generators of random numbers that loaders draw from besides the process's own."""

from __future__ import annotations

from typing import Any

from drivetrain.data.combined import is_collection, leaves
from drivetrain.generators import is_generator

# What loaders, samplers and data sets keep each other by.
_PARTS = ("sampler", "batch_sampler", "dataset", "loader")
_SEVERAL = ("datasets", "flattened")


def own_generators(*loaders: Any) -> list[Any]:
    """Return the generators that the loaders, their samplers and their data sets have as attributes.

    Args:
        loaders: a loader each, or a collection of them; other objects are looked at likewise.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = [leaf for loader in loaders for leaf in (leaves(loader) if is_collection(loader) else [loader])]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        attributes = getattr(part, "__dict__", {})
        found.update({id(value): value for value in attributes.values() if is_generator(value)})
        waiting += [attributes[name] for name in _PARTS if name in attributes]
        for name in _SEVERAL:
            several = attributes.get(name)
            waiting += several if isinstance(several, list | tuple) else ()
    return list(found.values())
