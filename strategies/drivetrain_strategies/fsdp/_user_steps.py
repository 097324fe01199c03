"""Lets steps of the user combine sharded parameters with plain tensors, and write them, as under DDP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from drivetrain.errors import ConfigurationError
from drivetrain_strategies._callers import is_called_by_library, tensors_in
from drivetrain_strategies._manual_updates import GATHERED_UPDATE_REASON_AND_FIX, manual_update_error
from drivetrain_strategies._module_checks import refuse_gradients_through
from drivetrain_strategies.fsdp._internals import Sharded
from drivetrain_strategies.fsdp._original_parameters import Original
from drivetrain_strategies.fsdp._shard_writes import (
    GET_GRADIENT,
    READ_WHOLE,
    SET_DATA,
    SET_GRADIENT,
    ShardWrites,
    is_in_place,
)
from drivetrain_strategies.fsdp._state import in_layout_of

_ACCESS = (SET_DATA, GET_GRADIENT, SET_GRADIENT)
_READ_WHOLE = READ_WHOLE | {"flatten", "ravel", "view", "reshape", "_weight_norm", "_weight_norm_interface"}
"""Names of functions that DTensor supports only for some shapes, or not at all."""


class UserSteps:
    """Runs the steps of a module such that user code may combine sharded parameters with plain tensors.

    Outside of its unit's forward, a parameter is a DTensor, which torch's operators do not combine with plain tensors.
    Operators on DTensors alone stay sharded, so a penalty over all parameters is computed in shards, and only its value
    is combined over the ranks. Intercepting operators takes time, so after a first call of a step that uses no sharded
    parameter in this way, later calls of this step are not intercepted.

    Args:
        module: the user's module.
        sharded: the sharded module.
        originals: the parameters that the shards replace.
    """

    def __init__(self, module: nn.Module, sharded: Sharded, originals: Sequence[Original]) -> None:
        self._mode = _StepAccess({id(one): name for name, one in module.named_parameters()}, sharded, originals)
        self._without: set[str] = set()  # names of the steps that need no interception

    def run(self, call: Callable[..., Any], step: Callable[..., Any], *args: Any) -> Any:
        """Return ``call(step, *args)``. Collective if ``step`` combines sharded parameters with plain tensors."""
        name = getattr(step, "__name__", "")
        if name in self._without or hasattr(step, "_torchdynamo_orig_callable"):  # a compiled step is not intercepted
            return call(step, *args)
        self._mode.found = False
        with self._mode:
            output = tree_map_only(DTensor, self._mode.whole, call(step, *args))
        if not self._mode.found:
            self._without.add(name)
        return output


class _StepAccess(ShardWrites):
    """What user code gets within a step that reads or writes sharded parameters.

    Args:
        names: names of the sharded parameters, by their ``id``.
        sharded: the sharded module.
        originals: the parameters that the shards replace. User code that kept one of them means the shard.
    """

    def __init__(self, names: Mapping[int, str], sharded: Sharded, originals: Sequence[Original]) -> None:
        super().__init__(names)
        self._sharded = sharded
        self._shard_of = {
            id(original.parameter): original.current
            for original in originals
            if original.current is not original.parameter
        }
        self.found = False
        """Whether user code has used a sharded parameter such that later calls are to be intercepted."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(id(one) in self._shard_of for one in tensors_in(args)) and not is_called_by_library():
            self.found = True
            args = tuple(map(self._current, args))
        target = args[0] if args else None
        if func in (torch.autograd.grad, torch.Tensor.backward):
            self._refuse_second_order(func, args, kwargs)
        elif (func in _ACCESS or is_in_place(func)) and self._is_sharded(target) and not is_called_by_library():
            return self._access(func, target, args, kwargs)
        kinds = {isinstance(one, DTensor) for one in tensors_in((*args, *kwargs.values()))}
        reads_whole = True in kinds and getattr(func, "__name__", "") in _READ_WHOLE
        if (len(kinds) < 2 and not reads_whole) or is_called_by_library():  # as in manual optimization
            return func(*args, **kwargs)
        return func(*map(self._whole_operand, args), **{key: self._whole_operand(one) for key, one in kwargs.items()})

    def whole(self, value: DTensor) -> torch.Tensor:
        """Return the whole tensor, whose gradient flows to ``value``. Collective."""
        self.found = True
        return self._sharded.whole(value)

    def _is_sharded(self, value: Any) -> bool:
        return isinstance(value, DTensor) or id(value) in self._sharded.shards_by_gathered_id()

    def _access(self, func: Any, target: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(target, DTensor):
            return self._access_gathered(func, target, args, kwargs)
        if func in (GET_GRADIENT, SET_GRADIENT):
            return func(*args, **kwargs)
        self.found = True
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
        if func == GET_GRADIENT:
            self.found = self.found or shard.grad is not None
            return shard.grad if target.grad is None else target.grad
        if func == SET_GRADIENT and shard.grad is not None:
            self.found = True
            shard.grad = None if args[1] is None else in_layout_of(args[1], shard)
            return None
        if func == SET_DATA or (is_in_place(func) and not torch.is_grad_enabled()):
            raise manual_update_error([self.names[id(shard)]], "FSDPStrategy", GATHERED_UPDATE_REASON_AND_FIX)
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
        return self.whole(value) if isinstance(value, DTensor) else value
