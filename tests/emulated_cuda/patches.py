"""Temporary changes of attributes."""

from __future__ import annotations

import contextlib
from typing import Any

_MISSING = object()


class Patches:
    """Sets attributes, and restores them when the exit stack is closed."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set one attribute of a module or a class."""
        before = owner.__dict__.get(name, _MISSING)
        setattr(owner, name, value)
        if before is _MISSING:
            self._stack.callback(delattr, owner, name)
        else:
            self._stack.callback(setattr, owner, name, before)
