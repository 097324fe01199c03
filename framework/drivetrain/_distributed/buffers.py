"""Makes buffers match across ranks after a step has created or resized buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from drivetrain._distributed.control_plane import ControlPlane, do_ranks_differ


def match_buffers_to_rank_0(module: nn.Module, control: ControlPlane) -> None:
    """Give the module's buffers the names, shapes and dtypes that they have on rank 0. Collective.

    If the buffers already match, as almost always, the ranks only compare a digest through the store. If the module
    has no buffers, the ranks do not communicate.
    """
    if not any(layer._buffers for layer in module.modules()):
        return
    buffers = dict(module.named_buffers())
    specs = {name: [[*buffer.shape], str(buffer.dtype).removeprefix("torch.")] for name, buffer in buffers.items()}
    if not do_ranks_differ(control, "the form of buffers", specs):
        return
    rank_0_specs: dict[str, Any] = control.broadcast_object(specs)
    for name in [*specs, *rank_0_specs]:
        if specs.get(name) == rank_0_specs.get(name):
            continue
        owner, _, attribute = name.rpartition(".")
        buffer = None
        if name in rank_0_specs:
            shape, dtype = rank_0_specs[name]
            device = next((tensor.device for tensor in (*module.parameters(), *buffers.values())), None)
            buffer = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        module.get_submodule(owner)._buffers[attribute] = buffer
