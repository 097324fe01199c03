"""Imports public names on first use (PEP 562), and optional packages."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.errors import ConfigurationError


def lazy_names(
    package: str, defining_modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the package's ``__getattr__``, ``__dir__`` and ``__all__``.

    Args:
        package: the ``__name__`` of the package.
        defining_modules: maps each public name to the module that defines the name, and a public submodule to itself.
            A module's name is absolute, or relative to the package (".module").
    """

    def get(name: str) -> Any:
        if name not in defining_modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(defining_modules[name], package)
        value = module if module.__name__ == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)  # later look-ups do not call this function
        return value

    names = sorted(defining_modules)
    return get, lambda: names, names


def is_installed(*modules: str) -> bool:
    """Return True if all ``modules`` can be imported, without importing them.

    The result is not cached. lightning_utilities' `package_available` caches its result, so a notebook that installs a
    missing package would have to be restarted.
    """
    try:
        return all(importlib.util.find_spec(module) is not None for module in modules)
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        return False


def import_optional(module: str, owner: str, fix: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: the module.
        owner: what needs the package.
        fix: how to install the package, or what to use instead.

    Raises:
        ConfigurationError: the package is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigurationError(
            f"{owner} needs {package}, which is not installed.", f"{owner} uses that package ({error}).", fix
        ) from error
