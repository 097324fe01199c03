"""What `predict` keeps: outputs in the host's memory, which nobody else writes to, and their way to the other ranks."""

from __future__ import annotations

import contextlib
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._runtime.transfer import map_tensors
from drivetrain.data._batch_copies import copy_batch
from drivetrain.errors import ConfigurationError

_HOST = torch.device("cpu")


def on_host(output: Any, fresh_memory: bool) -> Any:
    """Return ``output`` with its tensors on the CPU: what is kept takes none of the device's memory.

    Args:
        output: what a step returned: tensors in collections of any depth, and anything else.
        fresh_memory: the loader does not write the next batch over this one, of which ``output`` may be a part.
    """
    moved = map_tensors(output, _moved)
    return moved if fresh_memory else copy_batch(moved)


def exchange(kept: list[Any], control: ControlPlane) -> list[list[Any]]:
    """Return what each rank has kept, by rank, on every rank. Objects of the user's own travel as pickles.

    Raises:
        ConfigurationError: something cannot be pickled.
    """
    if control.world_size == 1:
        return [kept]
    stream = io.BytesIO()
    try:
        _HostPickler(stream, pickle.HIGHEST_PROTOCOL).dump(kept)
    except Exception as error:
        raise ConfigurationError(
            f"predict_step returned what cannot be sent to the other ranks: {error}",
            "every rank gets the outputs of all, and objects travel as pickles.",
            "return tensors, or write the outputs in on_predict_batch_end and call predict with "
            "return_predictions=False.",
        ) from error
    return [pickle.loads(one) for one in control.gather_bytes(stream.getvalue())]


def _moved(value: Any) -> Any:
    if isinstance(value, Tensor):
        # A copy here, too: a view would keep, and a pickle would send, all that it is a view of, and what the module
        # goes on writing to would change under the hand.
        return value.clone() if value.device == _HOST else value.to(_HOST)
    if isinstance(value, nn.Module):  # it would move itself, and it may be the model's
        return value
    with contextlib.suppress(Exception):  # a `to` that means something else
        here = value.to(_HOST)
        if isinstance(value, PackedSequence) or isinstance(getattr(value, "batch_size", None), torch.Size):
            return copy_batch(here)  # on the CPU already, it (or a TensorDict) would still be a view
        return value if here is None else here
    return value


class _HostPickler(pickle.Pickler):
    """Sends the tensors within a user's own objects from the CPU, to the CPU."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device != _HOST and not value.is_meta:
            return value.detach().to(_HOST).__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return NotImplemented
