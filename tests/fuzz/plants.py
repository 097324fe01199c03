"""Defects that are planted, one by one, to see that the generator finds them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

PLANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Within it the defect ``name`` is there; none for ""."""
    if not name:
        yield
        return
    with PLANTS[name]():
        yield
