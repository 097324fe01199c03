"""Lets hooks and steps of the user read and write sharded parameters, and call the module, as under DDP.

torch drops some writes to shards, and combines no DTensor with a plain tensor. What cannot take effect is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from drivetrain.errors import ConfigurationError
from drivetrain_strategies._user_calls import (
    is_called_by_library,
    refuse_gradients_through,
    tensors_in,
    writes_in_place,
)
from drivetrain_strategies.fsdp._changed_dtensor import SET_DATA
from drivetrain_strategies.fsdp._gradients import gathered_update_error
from drivetrain_strategies.fsdp._internals import Sharded
from drivetrain_strategies.fsdp._state import in_layout_of, write_value

_GET_GRADIENT, _SET_GRADIENT = cast(Any, torch.Tensor.grad).__get__, cast(Any, torch.Tensor.grad).__set__
_ACCESS = (SET_DATA, _GET_GRADIENT, _SET_GRADIENT)

_READ_WHOLE = {
    *("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "sort", "topk", "median", "quantile"),
    *("allclose", "isclose", "equal", "tolist", "numpy", "__format__", "__array__"),
}
"""Names of functions that DTensor does not support, or only if every rank has elements."""

_READ_WHOLE_IN_STEPS = _READ_WHOLE | {"flatten", "ravel", "view", "reshape", "_weight_norm", "_weight_norm_interface"}
"""Names of functions that DTensor supports only for some shapes, or not at all."""


class UserHooks:
    """What hooks of the user may do with sharded parameters: read and write them, and call the module.

    Hooks find the shards and their gradients. In manual optimization, hooks run within the forward of the root unit,
    whose parameters are therefore sharded while a hook runs. While a layer of the module runs in a hook, the root
    unit's parameters are gathered. Inner units gather their own parameters. Between forward and backward, the forward
    of the root unit does this.

    Args:
        module: the user's module.
        sharded: the sharded module.
    """

    def __init__(self, module: nn.Module, sharded: Sharded) -> None:
        self._layers = {id(layer) for layer in module.modules()}
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._sharded = sharded
        self._depth = 0

    @contextmanager
    def context(self, name: str, within_forward: bool, has_gradients: bool) -> Iterator[None]:
        """Context manager in which the hook ``name`` runs. Collective if the hook calls a layer, or within a forward.

        Args:
            name: the hook's name.
            within_forward: whether the root unit's forward has not ended, as in manual optimization.
            has_gradients: whether the shards have the gradients of the window.
        """
        with ShardWrites(self._names, has_gradients):
            if name == "on_before_backward":
                yield
                return
            if within_forward:
                self._sharded.reshard()
            handles = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()
                self._depth = 0
            if within_forward:
                self._sharded.gather_root()

    def _enter(self, layer: nn.Module, inputs: Any) -> None:
        if id(layer) in self._layers:
            if self._depth == 0:
                self._sharded.prepare_root()
                self._sharded.root.unshard()
            self._depth += 1

    def _leave(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if id(layer) in self._layers:
            self._depth -= 1
            if self._depth == 0:
                self._sharded.reshard()


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
        if not self._has_gradients and func in (_GET_GRADIENT, _SET_GRADIENT) and id(target) in self.names:
            raise ConfigurationError(
                f"on_after_backward used the gradient of {self.names[id(target)]!r} under FSDPStrategy.",
                "FSDP has the gradients of a window only at its end, and this batch is not the window's last.",
                "read and edit gradients in on_before_optimizer_step.",
            )
        if isinstance(target, DTensor) and writes_in_place(func):
            return self.write(func, target, args[1:], kwargs)
        if _reads_whole(func, args, kwargs) and any(isinstance(one, DTensor) for one in tensors_in(args)):
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
                write_value(target, whole)
            return None
        return func(target, *(self._in_layout(one, target) for one in others), **kwargs)

    def _in_layout(self, value: Any, target: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.dim():
            return in_layout_of(value.detach().expand(target.shape), target)
        return value


class UserSteps(ShardWrites):
    """Runs the steps of a module such that user code may combine sharded parameters with plain tensors.

    Outside of its unit's forward, a parameter is a DTensor, which torch's operators do not combine with plain tensors.
    Operators on DTensors alone stay sharded, so a penalty over all parameters is computed in shards, and only its value
    is combined over the ranks. Intercepting operators takes time, so after a first call of a step that uses no sharded
    parameter in this way, later calls of this step are not intercepted.

    Args:
        module: the user's module.
        sharded: the sharded module.
        shards: the shard that replaces each parameter, by the ``id`` of the original. User code that kept an original
            means the shard.
    """

    def __init__(self, module: nn.Module, sharded: Sharded, shards: Mapping[int, nn.Parameter]) -> None:
        super().__init__({id(parameter): name for name, parameter in module.named_parameters()})
        self._sharded = sharded
        self._shard_of = shards
        self._found = False
        """Whether user code has used a sharded parameter such that later calls are to be intercepted."""
        self._without: set[str] = set()  # names of the steps that need no interception

    def run(self, call: Callable[..., Any], step: Callable[..., Any], *args: Any) -> Any:
        """Return ``call(step, *args)``. Collective if ``step`` combines sharded parameters with plain tensors."""
        name = getattr(step, "__name__", "")
        if name in self._without or hasattr(step, "_torchdynamo_orig_callable"):  # a compiled step is not intercepted
            return call(step, *args)
        self._found = False
        with self:
            output = tree_map_only(DTensor, self._whole_with_gradient, call(step, *args))
        if not self._found:
            self._without.add(name)
        return output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(id(one) in self._shard_of for one in tensors_in(args)) and not is_called_by_library():
            self._found = True
            args = tuple(map(self._current, args))
        target = args[0] if args else None
        if func in (torch.autograd.grad, torch.Tensor.backward):
            self._refuse_second_order(func, args, kwargs)
        elif (func in _ACCESS or writes_in_place(func)) and self._is_sharded(target) and not is_called_by_library():
            return self._access(func, target, args, kwargs)
        kinds = {isinstance(one, DTensor) for one in tensors_in((*args, *kwargs.values()))}
        reads_whole = True in kinds and getattr(func, "__name__", "") in _READ_WHOLE_IN_STEPS
        if (len(kinds) < 2 and not reads_whole) or is_called_by_library():  # as in manual optimization
            return func(*args, **kwargs)
        return func(*map(self._whole_operand, args), **{key: self._whole_operand(one) for key, one in kwargs.items()})

    def _whole_with_gradient(self, value: DTensor) -> torch.Tensor:
        """Return the whole tensor, whose gradient flows to ``value``. Collective."""
        self._found = True
        return self._sharded.whole(value)

    def _is_sharded(self, value: Any) -> bool:
        return isinstance(value, DTensor) or id(value) in self._sharded.shards_by_gathered_id()

    def _access(self, func: Any, target: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(target, DTensor):
            return self._access_gathered(func, target, args, kwargs)
        if func in (_GET_GRADIENT, _SET_GRADIENT):
            return func(*args, **kwargs)
        self._found = True
        is_result = id(target) not in self.names and target.requires_grad
        if is_result and any(not isinstance(one, DTensor) for one in tensors_in(args[1:])):
            raise ConfigurationError(
                "A result of sharded parameters is combined with a plain tensor in place under FSDPStrategy.",
                "the result is sharded, and the sum of both would not be.",
                "write total = total + loss instead of total += loss.",
            )
        return super().__torch_function__(func, (), args, kwargs)

    def _access_gathered(self, func: Any, target: Any, args: Any, kwargs: Any) -> Any:
        shard: Any = self._sharded.shards_by_gathered_id()[id(target)]
        if func == _GET_GRADIENT:
            self._found = self._found or shard.grad is not None
            return shard.grad if target.grad is None else target.grad
        if func == _SET_GRADIENT and shard.grad is not None:
            self._found = True
            shard.grad = None if args[1] is None else in_layout_of(args[1], shard)
            return None
        if func == SET_DATA or (writes_in_place(func) and not torch.is_grad_enabled()):
            raise gathered_update_error([self.names[id(shard)]])
        return func(*args, **kwargs)

    def _refuse_second_order(self, func: Any, args: Any, kwargs: Any) -> None:
        if func is torch.Tensor.backward and not (kwargs.get("create_graph") or (len(args) > 3 and args[3])):
            return
        gathered = self._sharded.shards_by_gathered_id()
        names = {key: self.names[id(shard)] for key, shard in gathered.items() if id(shard) in self.names}
        outputs = args[0] if args else kwargs["outputs"]
        refuse_gradients_through(outputs, {**self.names, **names}, "FSDPStrategy")

    def _current(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self._current, value))
        return self._shard_of.get(id(value), value)

    def _whole_operand(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self._whole_operand, value))
        return self._whole_with_gradient(value) if isinstance(value, DTensor) else value


def _reads_whole(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a function of torch is one for which a sharded tensor has to be gathered."""
    name = getattr(func, "__name__", "")
    if name in ("norm", "vector_norm", "linalg_vector_norm"):  # fails on ranks without elements
        return any(abs(float(one)) == torch.inf for one in _orders(args, kwargs))
    return name in _READ_WHOLE


def _orders(args: Any, kwargs: Any) -> list[Any]:
    given = [*args[1:2], kwargs.get("p"), kwargs.get("ord")]
    return [one for one in given if isinstance(one, float) or one in ("inf", "-inf")]


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _is_sharded(tensor: Any) -> bool:
    return any(placement.is_shard() for placement in tensor.placements)
