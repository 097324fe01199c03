"""Moves the outputs of `predict` to host memory, and exchanges them between ranks."""

from __future__ import annotations

import contextlib
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from drivetrain._data.batch_copies import copy_batch
from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._runtime.transfer import map_tensors

_HOST = torch.device("cpu")


def on_host(output: Any, fresh_memory: bool) -> Any:
    """Return ``output`` with its tensors on the CPU, so that the result takes no device memory.

    Args:
        output: the output of a step: tensors in collections of any depth, and other objects.
        fresh_memory: False if the loader may overwrite the batch, of which ``output`` may be a part.
    """
    moved = map_tensors(output, _to_host)
    return moved if fresh_memory else copy_batch(moved)


def exchange(outputs: list[Any], control: ControlPlane) -> list[list[Any]]:
    """Return the outputs of all ranks, by rank, on every rank. The outputs are sent as pickles."""
    if control.world_size == 1:
        return [outputs]
    stream = io.BytesIO()
    _HostPickler(stream, pickle.HIGHEST_PROTOCOL).dump(outputs)
    return [pickle.loads(pickled) for pickled in control.gather_bytes(stream.getvalue())]


def _to_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        # A tensor on the CPU is copied too. A view would keep its whole base alive, a pickle of the view would contain
        # the base, and the module may still write to the tensor.
        return value.clone() if value.device == _HOST else value.to(_HOST)
    if isinstance(value, nn.Module):  # not moved, since `to` works in place and the layer may be part of the model
        return value
    with contextlib.suppress(Exception):  # `to` may be an unrelated method
        moved = value.to(_HOST)
        if isinstance(value, PackedSequence) or isinstance(getattr(value, "batch_size", None), torch.Size):
            return copy_batch(moved)  # a value that was on the CPU may still be a view
        return value if moved is None else moved
    return value


class _HostPickler(pickle.Pickler):
    """Pickles tensors within users' objects as CPU tensors, so that they are unpickled on the CPU."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device != _HOST and not value.is_meta:
            return value.detach().to(_HOST).__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return NotImplemented
