"""A value that decides something, the same on every rank."""

from __future__ import annotations

import torch

from drivetrain._distributed.control_plane import ControlPlane


def agreed_value(control: ControlPlane, name: str, value: torch.Tensor | float | None) -> float | None:
    """Return one value for all ranks; None where no rank has one. Collective.

    A value that is equal everywhere comes back as it is; one that is local to the ranks (a step's, ``sync_dist=False``)
    is their mean, over those that have it: a rank without data may have logged nothing.

    Args:
        control: the way to the other ranks.
        name: of the value, for the error.
        value: this rank's.

    Raises:
        DistributedError: the other ranks came to something else, as where a callback is on some ranks only.
    """
    control.agree(f"the value of {name!r}, which decides something")
    mine = torch.zeros(2, dtype=torch.float64)
    if value is not None:
        mine[0], mine[1] = 1.0, value
    everyone = control.all_gather(mine)
    values = everyone[everyone[:, 0] > 0, 1]
    if len(values) == 0:
        return None
    same = bool((values == values[0]).all())
    return float(values[0] if same else values.mean())
