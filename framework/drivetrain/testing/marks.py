"""Marks that skip a test if the machine does not meet its requirements. Only creating a mark imports pytest."""

from __future__ import annotations

import importlib.util
import operator
import shutil
import sys
from typing import TYPE_CHECKING

import torch
from lightning_utilities.core.imports import compare_version

if TYPE_CHECKING:
    import pytest


def requires_cuda(count: int = 1) -> pytest.MarkDecorator:
    """Skip if there are fewer than ``count`` CUDA devices."""
    available = torch.cuda.device_count()
    return _skip(available < count, f"needs {count} CUDA device(s), there are {available}")


def requires_linux() -> pytest.MarkDecorator:
    """Skip if the operating system is not Linux."""
    return _skip(sys.platform != "linux", f"needs Linux, this is {sys.platform}")


def requires_package(name: str, minimum: str | None = None) -> pytest.MarkDecorator:
    """Skip if the package is not installed, or is older than ``minimum``.

    Args:
        name: the name under which the package is imported.
        minimum: the lowest version that is sufficient. The check of the version imports the package.
    """
    try:
        missing = importlib.util.find_spec(name) is None
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        missing = True
    too_old = not missing and minimum is not None and not compare_version(name, operator.ge, minimum)
    return _skip(missing or too_old, f"needs {name}" + (f" >= {minimum}" if minimum else ""))


def requires_command(name: str) -> pytest.MarkDecorator:
    """Skip if there is no command called ``name``."""
    return _skip(shutil.which(name) is None, f"needs the command {name}")


def _skip(condition: bool, reason: str) -> pytest.MarkDecorator:
    import pytest

    return pytest.mark.skipif(condition, reason=reason)
