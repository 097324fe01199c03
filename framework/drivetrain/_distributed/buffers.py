"""Buffers whose form differs between ranks: one that a step made on those with data, or let grow."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn

from drivetrain._distributed.control_plane import ControlPlane


def take_forms_of_rank_0(module: nn.Module, control: ControlPlane) -> None:
    """Give the module's buffers the names, shapes and dtypes that they have on rank 0. Every rank calls it.

    Where they have them on every rank, as almost always, a number goes over the store; where there is no place for one
    (`register_buffer` makes it), nothing.
    """
    if not any(layer._buffers for layer in module.modules()):
        return
    buffers = dict(module.named_buffers())
    own = {name: [[*buffer.shape], str(buffer.dtype).removeprefix("torch.")] for name, buffer in buffers.items()}
    mark = zlib.crc32(repr(own).encode())
    (others,) = control.agree("the form of buffers", control.from_rank_0(mark) != mark)
    if not others:
        return
    wanted: dict[str, Any] = control.from_rank_0(own)
    for name in [*own, *wanted]:
        if own.get(name) == wanted.get(name):
            continue
        owner, _, last = name.rpartition(".")
        fresh = None
        if name in wanted:
            shape, dtype = wanted[name]
            device = next((one.device for one in (*module.parameters(), *buffers.values())), None)
            fresh = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        module.get_submodule(owner)._buffers[last] = fresh
