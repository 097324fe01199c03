"""A value that decides something, the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from drivetrain.fit import Fit


def monitored_value(trainer: Fit, name: str) -> float | None:
    """Return the logged value ``name``, the same on every rank; ``None`` where no rank has it. Collective.

    A value that is equal everywhere comes back as it is; one that is local to the ranks is their mean (over those
    that have it: a rank without data may have logged nothing). Who asks never needs to know which it is.
    """
    value = trainer.callback_metrics.get(name)
    mine = torch.zeros(2, dtype=torch.float64)
    if value is not None:
        mine[0], mine[1] = 1.0, value
    everyone = trainer.strategy.control.all_gather(mine)
    values = everyone[everyone[:, 0] > 0, 1]
    if len(values) == 0:
        return None
    same = bool((values == values[0]).all())
    return float(values[0] if same else values.mean())
