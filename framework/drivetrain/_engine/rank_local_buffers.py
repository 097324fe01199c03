"""Buffers that are each rank's own, in a checkpoint: what no strategy gives out, a run that goes on has as it was."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._engine.evaluation_buffers import is_held_here
from drivetrain._runtime.transfer import row_major
from drivetrain.checkpoint._format.checksums import crc32


def own_buffers(
    module: nn.Module, saved: Collection[str], aside: Mapping[str, torch.Tensor], control: ControlPlane
) -> dict[str, torch.Tensor]:
    """Return this rank's values of the buffers that ranks have apart. Collective.

    Args:
        module: the user's.
        saved: names of what the checkpoint's weights hold, of some rank: other buffers are not persistent.
        aside: values that this rank goes on with, and does not have at the moment.
        control: the way to the other ranks.
    """
    if control.world_size == 1:
        return {}
    held = {
        name: aside.get(name, buffer)
        for name, buffer in module.named_buffers()
        if name in saved and is_held_here(buffer)
    }
    sums = control.gather_objects({name: _sum_of(buffer) for name, buffer in held.items()})
    return {name: buffer for name, buffer in held.items() if any(one.get(name) != sums[0].get(name) for one in sums)}


def _sum_of(buffer: torch.Tensor) -> int:
    """A checksum of the values: what they are compared by without sending them."""
    values = row_major(buffer.detach().cpu())
    return crc32(values.view(torch.uint8).numpy()) if len(values) else 0


@torch.no_grad()
def take_own_buffers(module: nn.Module, own: Mapping[str, torch.Tensor]) -> None:
    """Load what `own_buffers` gave on this rank."""
    for name, buffer in list(module.named_buffers()):
        if name not in own:
            continue
        if buffer.shape == own[name].shape:
            buffer.copy_(own[name])
            continue
        path, _, last = name.rpartition(".")
        module.get_submodule(path)._buffers[last] = own[name].to(buffer)
