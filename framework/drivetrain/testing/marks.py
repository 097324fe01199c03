"""Marks that skip a test if the machine does not meet its requirements. Only creating a mark imports pytest."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import pytest


def requires_cuda(count: int = 1) -> pytest.MarkDecorator:
    """Skip if there are fewer than ``count`` CUDA devices."""
    available = torch.cuda.device_count()
    return _skip(available < count, f"needs {count} CUDA device(s), there are {available}")


def requires_linux() -> pytest.MarkDecorator:
    """Skip if the operating system is not Linux."""
    return _skip(sys.platform != "linux", f"needs Linux, this is {sys.platform}")


def requires_package(name: str) -> pytest.MarkDecorator:
    """Skip if the package, which is imported under ``name``, is not installed."""
    try:
        missing = importlib.util.find_spec(name) is None
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        missing = True
    return _skip(missing, f"needs {name}")


def requires_command(name: str) -> pytest.MarkDecorator:
    """Skip if there is no command called ``name``."""
    return _skip(shutil.which(name) is None, f"needs the command {name}")


def _skip(condition: bool, reason: str) -> pytest.MarkDecorator:
    import pytest

    return pytest.mark.skipif(condition, reason=reason)
