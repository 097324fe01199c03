"""Makes writes of user code to sharded tensors take effect, or names the tensor: torch drops some of them silently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from drivetrain.errors import ConfigurationError
from drivetrain_strategies._callers import tensors_in
from drivetrain_strategies.fsdp._state import in_layout_of

SET_DATA = cast(Any, torch.Tensor.data).__set__
GET_GRADIENT, SET_GRADIENT = cast(Any, torch.Tensor.grad).__get__, cast(Any, torch.Tensor.grad).__set__

READ_WHOLE = {
    *("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "sort", "topk", "median", "quantile"),
    *("allclose", "isclose", "equal", "tolist", "numpy", "__format__", "__array__"),
}
"""Names of functions that DTensor does not support, or only if every rank has elements."""

_NOT_WRITING = {"requires_grad_", "detach_"}


class ShardWrites(TorchFunctionMode):
    """Lets user code write sharded tensors within this context, by index and with plain tensors.

    A write to a part that indexing has copied is an error. Some functions that read a sharded tensor get the whole.

    Args:
        names: names of the sharded parameters, by their ``id``.
        has_gradients: whether the shards have the gradients of the window; otherwise, using one is an error.
    """

    def __init__(self, names: Mapping[int, str], has_gradients: bool = True) -> None:
        self.names = names
        self._has_gradients = has_gradients

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else None
        if not self._has_gradients and func in (GET_GRADIENT, SET_GRADIENT) and id(target) in self.names:
            raise ConfigurationError(
                f"on_after_backward used the gradient of {self.names[id(target)]!r} under FSDPStrategy.",
                "FSDP has the gradients of a window only at its end, and this batch is not the window's last.",
                "read and edit gradients in on_before_optimizer_step.",
            )
        if isinstance(target, DTensor) and is_in_place(func):
            return self.write(func, target, args[1:], kwargs)
        if reads_whole(func, args, kwargs) and any(isinstance(one, DTensor) for one in tensors_in(args)):
            with torch.no_grad():
                return func(*map(_whole, args), **kwargs)
        return func(*args, **kwargs)

    def write(self, func: Any, target: Any, others: Any, kwargs: Any) -> Any:
        """Call an in-place function on a sharded tensor. Collective if it assigns to an index."""
        base = target._base if target._is_view() else None
        name = repr(self.names[id(base)]) if id(base) in self.names else "a sharded tensor"
        if base is not None and _is_sharded(base) and not _is_sharded(target):
            raise ConfigurationError(
                f"A part of {name} is written in place under FSDPStrategy.",
                "indexing a sharded tensor along its sharded dimension gives a copy, so the write would be lost.",
                "assign to the index on every rank (weight[0] = 0.5 * weight[0]), or write the whole tensor.",
            )
        if func is torch.Tensor.__setitem__:
            with torch.no_grad():
                whole = target.full_tensor()
                func(whole, *map(_whole, others))
                assign_data(target, whole)
            return None
        return func(target, *(self._in_layout(one, target) for one in others), **kwargs)

    def _in_layout(self, value: Any, target: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.dim():
            return in_layout_of(value.detach().expand(target.shape), target)
        return value


def keep_data_assignments() -> None:
    """Let assignments to ``.data`` of a DTensor, which torch drops, write its values."""

    def assign(tensor: Any, value: torch.Tensor) -> None:
        if value.shape == tensor.shape and value.dtype == tensor.dtype and value.device.type == tensor.device.type:
            assign_data(tensor, value)
        else:
            SET_DATA(tensor, value)

    cast(Any, DTensor).data = property(cast(Any, torch.Tensor.data).__get__, assign)


def drop_data_assignments() -> None:
    """Undo `keep_data_assignments`."""
    if "data" in vars(DTensor):
        del cast(Any, DTensor).data


@torch.no_grad()
def assign_data(shard: Any, value: Any) -> None:
    """Write ``value``, which is whole or a DTensor, into ``shard``."""
    part = cast(DTensor, value if isinstance(value, DTensor) else in_layout_of(value, shard))
    if part.placements != shard.placements:
        part = part.redistribute(placements=shard.placements)
    shard.to_local().copy_(part.to_local())


def reads_whole(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a function of torch is one for which a sharded tensor has to be gathered."""
    name = getattr(func, "__name__", "")
    if name in ("norm", "vector_norm", "linalg_vector_norm"):  # fails on ranks without elements
        return any(abs(float(one)) == torch.inf for one in _orders(args, kwargs))
    return name in READ_WHOLE


def _orders(args: Any, kwargs: Any) -> list[Any]:
    given = [*args[1:2], kwargs.get("p"), kwargs.get("ord")]
    return [one for one in given if isinstance(one, float) or one in ("inf", "-inf")]


def is_in_place(func: Any) -> bool:
    """Return whether a function of torch writes its first argument."""
    name = getattr(func, "__name__", "")
    if name in _NOT_WRITING:
        return False
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _is_sharded(tensor: Any) -> bool:
    return any(placement.is_shard() for placement in tensor.placements)
