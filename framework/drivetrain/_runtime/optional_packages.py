"""Tells whether optional packages are installed, without importing them."""

from __future__ import annotations

import importlib.util


def is_installed(*modules: str) -> bool:
    """Return True if every one of ``modules`` can be imported; imports none of them.

    lightning_utilities' `package_available` caches its answer, so a notebook that installs the package after the error
    would have to be restarted.
    """
    try:
        return all(importlib.util.find_spec(module) is not None for module in modules)
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        return False
