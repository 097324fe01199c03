"""Programs in which something was found, shrunken: each is run again by `make test`."""

from __future__ import annotations

from typing import NamedTuple

from fuzz.program import Program


class Example(NamedTuple):
    """A program, and what it found."""

    name: str
    found: str
    program: Program


EXAMPLES: tuple[Example, ...] = ()
