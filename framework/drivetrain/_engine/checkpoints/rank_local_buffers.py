"""Saves and restores the buffers whose values differ between ranks, because the strategy does not synchronize them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._format.checksums import crc32
from drivetrain._loops.window_snapshot import has_local_values
from drivetrain._runtime.compiled_names import plain_name
from drivetrain._runtime.transfer import row_major


def collect_rank_local_buffers(
    module: nn.Module, saved: Collection[str], overrides: Mapping[str, torch.Tensor], control: ControlPlane
) -> dict[str, torch.Tensor]:
    """Return this rank's values of the buffers that differ between ranks. Collective.

    Args:
        module: the user's module.
        saved: the names in the checkpoint's weights. Buffers with other names are not persistent.
        overrides: this rank's values of the buffers that hold rank 0's values during an evaluation.
        control: the control plane.
    """
    buffers = {
        name: overrides.get(name, buffer)
        for name, buffer in module.named_buffers()
        if name in saved and has_local_values(buffer)
    }
    checksums = control.gather_objects({name: _checksum(buffer) for name, buffer in buffers.items()})
    return {
        name: buffer
        for name, buffer in buffers.items()
        if any(rank_checksums.get(name) != checksums[0].get(name) for rank_checksums in checksums)
    }


def _checksum(buffer: torch.Tensor) -> int:
    """Return a checksum of the values, by which ranks compare the values without sending them."""
    values = row_major(buffer.detach().cpu())
    return crc32(values.view(torch.uint8).numpy()) if len(values) else 0


@torch.no_grad()
def load_rank_local_buffers(module: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Load the buffers that `collect_rank_local_buffers` returned on this rank."""
    for path_and_key, buffer in list(nn.Module.named_buffers(module)):
        name = plain_name(path_and_key)
        if name not in saved:
            continue
        if buffer.shape == saved[name].shape:
            buffer.copy_(saved[name])
            continue
        path, _, key = path_and_key.rpartition(".")
        module.get_submodule(path)._buffers[key] = saved[name].to(buffer)
