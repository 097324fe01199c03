"""Reduces a value to the same number on every rank, for decisions that must be the same on all ranks."""

from __future__ import annotations

import torch

from drivetrain._distributed.control_plane import ControlPlane


def agreed_value(control: ControlPlane, name: str, value: torch.Tensor | float | None) -> float | None:
    """Return one value for all ranks, or None if no rank has a value. Collective.

    A value that is equal on all ranks is returned unchanged. Other values (of a step, or with ``sync_dist=False``) are
    averaged over the ranks that have a value, because a rank without data may have logged nothing.

    Args:
        control: the control plane.
        name: the name of the value, for errors.
        value: the value of this rank, or None.

    Raises:
        DistributedError: other ranks made a different call, for example because a callback exists on some ranks only.
    """
    control.count_flags(f"the value of {name!r}, on which a decision depends")
    local = torch.zeros(2, dtype=torch.float64)
    if value is not None:
        local[0], local[1] = 1.0, value
    gathered = control.all_gather(local)
    values = gathered[gathered[:, 0] > 0, 1]
    if len(values) == 0:
        return None
    all_equal = bool((values == values[0]).all())
    return float(values[0] if all_equal else values.mean())
