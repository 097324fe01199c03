"""Public helpers for tests: functions on several ranks, parity assertions, marks for what a machine must have."""

from __future__ import annotations

from drivetrain.testing.distributed import run_distributed

__all__ = ["run_distributed"]
