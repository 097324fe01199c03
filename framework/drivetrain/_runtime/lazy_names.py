"""A package whose names are imported on first use, so that importing it costs next to nothing (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the package's ``__getattr__`` and ``__dir__``.

    Args:
        package: its ``__name__``.
        homes: by public name the module it is in, whole or with a dot before it (".module") as within the package.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name], package), name)
        setattr(sys.modules[package], name, value)  # the next look-up no longer comes here
        return value

    def names() -> list[str]:
        return sorted(homes)

    return get, names
