"""Makes ``item()``, ``float()``, ``int()`` and ``bool()`` of a sharded result give the value of the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

_ITEM = torch.ops.aten._local_scalar_dense.default


def read_whole_scalars() -> None:
    """Let DTensor combine the parts of a scalar before it is read. torch reads this rank's part, without a word.

    The norm of a sharded weight, for example, is a DTensor that holds the norm of this rank's part. Reading it is
    collective, so all ranks have to read it.
    """
    _handlers().setdefault(_ITEM, _read_whole)


def read_local_scalars() -> None:
    """Undo `read_whole_scalars`."""
    if _handlers().get(_ITEM) is _read_whole:
        del _handlers()[_ITEM]


def _handlers() -> dict[Any, Any]:
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


@torch.no_grad()
def _read_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not all(placement.is_replicate() for placement in tensor.placements):
        tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return op(tensor.to_local(), **kwargs)
