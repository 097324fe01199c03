"""Reads the value that a callback monitors, the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._metrics.agreed_value import agreed_value

if TYPE_CHECKING:
    from drivetrain.run_context import RunContext


def monitored_value(trainer: RunContext, name: str) -> float | None:
    """Return the logged value ``name``, the same on every rank, or None if no rank has logged it.

    A collective operation.
    """
    return agreed_value(trainer.strategy.control, name, trainer.callback_metrics.get(name))
