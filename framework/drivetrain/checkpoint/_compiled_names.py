"""The part of a name that comes from `torch.compile`."""

from __future__ import annotations

COMPILED = "_orig_mod."
"""What ``torch.compile(submodule)`` puts into the names of the submodule's parameters."""


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts of compiled modules, so that code without compilation has it too."""
    return name.replace(COMPILED, "") if COMPILED in name else name
