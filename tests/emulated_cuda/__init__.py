"""CUDA emulated in host memory, for builds of torch without CUDA: devices, streams and events with race detection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emulated_cuda.building import emulation_obstacle
from emulated_cuda.emulation import EmulatedCuda, emulated_cuda
from emulated_cuda.findings import Copy, FreeInUse, HostSync, Operation, Race

if TYPE_CHECKING:
    import pytest

__all__ = [
    "Copy",
    "EmulatedCuda",
    "FreeInUse",
    "HostSync",
    "Operation",
    "Race",
    "emulated_cuda",
    "requires_emulated_cuda",
]


def requires_emulated_cuda() -> pytest.MarkDecorator:
    """Skip if there is no C++ compiler for `emulated_cuda`, or torch was built with CUDA. Nothing is compiled."""
    import pytest

    reason = emulation_obstacle()
    return pytest.mark.skipif(reason is not None, reason=f"the emulation of CUDA {reason}")
