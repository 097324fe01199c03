"""Test helpers: functions on several ranks, parity assertions, marks."""

from __future__ import annotations

from drivetrain.testing.marks import (
    requires_command,
    requires_cuda,
    requires_linux,
    requires_package,
)
from drivetrain.testing.parity import assert_close_states, assert_close_traces, assert_equal_ranks
from drivetrain.testing.run_distributed import World, run_distributed

__all__ = [
    "World",
    "assert_close_states",
    "assert_close_traces",
    "assert_equal_ranks",
    "requires_command",
    "requires_cuda",
    "requires_linux",
    "requires_package",
    "run_distributed",
]
