"""Lets steps of the user combine sharded parameters with plain tensors, and assign to them, as under DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from drivetrain.errors import ConfigurationError
from drivetrain_strategies._callers import is_called_by_library
from drivetrain_strategies._module_checks import refuse_gradients_through
from drivetrain_strategies.fsdp._data_assignment import SET_DATA, assign_data
from drivetrain_strategies.fsdp._internals import Sharded


class UserSteps:
    """Runs the steps of a module such that operators may combine sharded parameters with plain tensors.

    Outside of its unit's forward, a parameter is a DTensor, which torch's operators do not combine with plain tensors.
    Operators on DTensors alone stay sharded, so a penalty over all parameters is computed in shards, and only its value
    is combined over the ranks. Intercepting operators takes time, so after a first call of a step that combines nothing
    later calls of this step are not intercepted.

    Args:
        module: the user's module.
        sharded: the sharded module.
    """

    def __init__(self, module: nn.Module, sharded: Sharded) -> None:
        self._mode = _WholeOperands({id(one): name for name, one in module.named_parameters()}, sharded)
        self._without: set[str] = set()  # names of the steps that combine nothing

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


class _WholeOperands(TorchFunctionMode):
    """Makes the DTensors whole that an operator is to combine with plain tensors.

    Args:
        names: names of the sharded parameters, by their ``id``.
        sharded: the sharded module.
    """

    def __init__(self, names: Mapping[int, str], sharded: Sharded) -> None:
        self._names = names
        self._sharded = sharded
        self.found = False
        """Whether an operator has combined sharded and plain tensors, or a step has assigned to a sharded parameter."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == SET_DATA:
            return self._assign(*args)
        if func is torch.autograd.grad:
            refuse_gradients_through(args[0] if args else kwargs["outputs"], self._step_names(), "FSDPStrategy")
        kinds = {isinstance(one, DTensor) for one in _tensors((*args, *kwargs.values()))}
        if len(kinds) < 2 or is_called_by_library():  # as in manual optimization
            return func(*args, **kwargs)
        written = kwargs.get("out", args[0]) if _is_in_place(func) or "out" in kwargs else ()
        for tensor in _tensors((written,)):
            if isinstance(tensor, DTensor):
                self._refuse(self._names.get(id(tensor), "A sharded tensor"))
        return func(*map(self._whole_operand, args), **{key: self._whole_operand(one) for key, one in kwargs.items()})

    def whole(self, value: DTensor) -> torch.Tensor:
        """Return the whole tensor, whose gradient flows to ``value``. Collective."""
        self.found = True
        self._sharded.allow_direct_gradients()
        return cast(torch.Tensor, _Whole.apply(value))  # type: ignore[no-untyped-call]

    def _step_names(self) -> dict[int, str]:
        gathered = self._sharded.shards_by_gathered_id()
        names = {key: self._names[id(shard)] for key, shard in gathered.items() if id(shard) in self._names}
        return {**self._names, **names}

    def _whole_operand(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self._whole_operand, value))
        return self.whole(value) if isinstance(value, DTensor) else value

    def _assign(self, target: Any, value: Any) -> None:
        if isinstance(target, DTensor):
            self.found = True
            assign_data(target, value)
            return
        shard = self._sharded.shards_by_gathered_id().get(id(target))
        if shard is not None:
            self._refuse(self._names.get(id(shard), "A sharded parameter"))
        SET_DATA(target, value)

    def _refuse(self, name: str) -> NoReturn:
        raise ConfigurationError(
            f"{name!r} is written within a step under FSDPStrategy.",
            "within a step, a sharded parameter is a shard or a gathered copy, which is dropped after the step.",
            "write weights in on_train_batch_end, where all of them are shards (docs/averaging.md has a teacher's "
            "update), or under torch.no_grad() with parameter.copy_(value).",
        )


def _tensors(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (one for one in value if isinstance(one, torch.Tensor))


def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__set__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


class _Whole(torch.autograd.Function):
    """Gathers a DTensor. Averages its gradient over the ranks, as all gradients are."""

    @staticmethod
    def forward(context: Any, value: DTensor) -> torch.Tensor:
        context.mesh = value.device_mesh
        return value.full_tensor()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> DTensor:
        mesh: DeviceMesh = context.mesh
        average = gradient / mesh.size()
        for dimension in range(mesh.ndim):
            dist.all_reduce(average, group=mesh.get_group(dimension))
        return DTensor.from_local(average, mesh, [Replicate()] * mesh.ndim, run_check=False)
