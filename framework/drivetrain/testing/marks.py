"""Marks that skip a test if the machine lacks what it needs. pytest is imported only when a mark is made."""

from __future__ import annotations

import importlib.util
import operator
import shutil
import sys
from typing import TYPE_CHECKING

import torch
from lightning_utilities.core.imports import compare_version

from drivetrain.testing._emulated_cuda.building import emulation_obstacle

if TYPE_CHECKING:
    import pytest


def requires_cuda(count: int = 1) -> pytest.MarkDecorator:
    """Skip where there are fewer than ``count`` CUDA devices."""
    found = torch.cuda.device_count()
    return _skip(found < count, f"needs {count} CUDA device(s), there are {found}")


def requires_emulated_cuda() -> pytest.MarkDecorator:
    """Skip where `emulated_cuda` has no C++ compiler, or torch has a CUDA of its own. Compiles nothing."""
    reason = emulation_obstacle()
    return _skip(reason is not None, f"the emulation of CUDA {reason}")


def requires_mps() -> pytest.MarkDecorator:
    """Skip where Apple's GPU is not available."""
    return _skip(not torch.backends.mps.is_available(), "needs an MPS device")


def requires_linux() -> pytest.MarkDecorator:
    """Skip on other systems than Linux."""
    return _skip(sys.platform != "linux", f"needs Linux, this is {sys.platform}")


def requires_package(name: str, minimum: str | None = None) -> pytest.MarkDecorator:
    """Skip where the package is not installed, or older than ``minimum``.

    Args:
        name: as it is imported.
        minimum: the lowest version that will do; asking for one imports the package.
    """
    try:
        missing = importlib.util.find_spec(name) is None
    except ModuleNotFoundError:  # of a dotted name, the package before the dot
        missing = True
    too_old = not missing and minimum is not None and not compare_version(name, operator.ge, minimum)
    return _skip(missing or too_old, f"needs {name}" + (f" >= {minimum}" if minimum else ""))


def requires_command(name: str) -> pytest.MarkDecorator:
    """Skip where there is no command of that name."""
    return _skip(shutil.which(name) is None, f"needs the command {name}")


def _skip(condition: bool, reason: str) -> pytest.MarkDecorator:
    import pytest

    return pytest.mark.skipif(condition, reason=reason)
