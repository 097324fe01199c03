"""Lets user code read and edit weights, which ZeRO keeps apart from the module's parameters.

What cannot take effect is an error that names the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drivetrain.errors import ConfigurationError, listed
from drivetrain_strategies._user_calls import (
    is_called_by_library,
    refuse_gradients_through,
    tensors_in,
    writes_in_place,
)
from drivetrain_strategies.deepspeed._internals import Zero, gathered_for_use, is_gathered
from drivetrain_strategies.deepspeed._state import State

_VERSION = attrgetter("_version")
_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")
_GRADIENT = cast(Any, Tensor.grad)


class UserHooks:
    """What hooks of the user see of a run's gradients and weights, and what they write there.

    In hooks that follow a backward, the groups of the optimizer hold the module's parameters, and a use of their
    gradients is an error. Weights that a hook wrote are copied to the master weights before these are used.

    Args:
        zero: DeepSpeed's engine.
        state: the state of the module.
    """

    def __init__(self, zero: Zero, state: State) -> None:
        self._zero = zero
        self._state = state
        parts = state.trained.values()
        # At stage 3, parameters get and lose their memory in each forward.
        self._watched = [] if zero.stage == 3 else [part.parameter for part in parts]
        self._params = [(part.flat_index, part.parameter) for part in parts if part.flat_index is not None]
        self._names = {key: state.names[key] for key in state.trained}
        self._may_have_written = False
        self._known = self._marks()

    @contextmanager
    def context(self, name: str) -> Iterator[None]:
        """Context manager in which a hook of the user runs; see `Strategy.hook_context`."""
        self._may_have_written = True
        with ExitStack() as contexts:
            if name in _GRADIENT_HOOKS:
                if name == "on_before_optimizer_step":
                    self._zero.reduce()  # uses the gradients, and is part of the norm that a hook may ask for
                contexts.enter_context(_RefusedGradients(self._names, name))
                contexts.enter_context(self._zero.params_in_groups(self._params))
            if self._zero.stage == 3:
                contexts.enter_context(EmptyParameters(self._state.names))
            yield

    def keep_writes(self) -> None:
        """Copy weights that user code may have written into the master weights. Does not communicate."""
        if self._may_have_written or self._known != self._marks():
            self._may_have_written, self._known = False, self._marks()
            self._state.adopt_compute_weights()

    def after_optimizer_step(self) -> None:
        """Accept the weights that the optimizer's step has written."""
        self._known = self._marks()

    def _marks(self) -> list[int]:
        """Return numbers that change when a weight is written in place, or is given other memory."""
        return [*map(_VERSION, self._watched), *map(torch.Tensor.data_ptr, self._watched)]


class _RefusedGradients(TorchFunctionMode):
    """Makes each use of ``parameter.grad`` an error.

    Args:
        names: names of the parameters, by the parameter's ``id``.
        hook: name of the hook that runs within this context.
    """

    def __init__(self, names: Mapping[int, str], hook: str) -> None:
        super().__init__()
        self._names = names
        self._hook = hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and id(args[0]) in self._names and getattr(func, "__self__", None) is _GRADIENT:
            raise ConfigurationError(
                f"{self._hook} used the gradient of {self._names[id(args[0])]!r} under DeepSpeed.",
                "ZeRO divides the gradients among the ranks, and its step would not use one that a hook has changed.",
                "use strategy='fsdp' or 'ddp', or read trainer.gradient_norm, the norm of all gradients.",
            )
        return func(*args, **(kwargs or {}))


_WITHOUT_VALUES = {
    *("grad", "requires_grad", "is_leaf", "grad_fn", "device", "dtype", "layout", "is_sparse", "is_meta", "is_cpu"),
    *("is_cuda", "is_nested", "is_quantized", "is_mkldnn", "names", "retains_grad", "_version", "_backward_hooks"),
    *("_post_accumulate_grad_hooks", "output_nr", "itemsize"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__hash__", "get_device"),
    *("is_floating_point", "is_complex", "element_size", "data_ptr", "untyped_storage"),
}
"""The attributes and methods of a parameter that do not depend on its values."""

_OF_SHAPE = {"shape", "ndim", "numel", "nelement", "dim", "__len__", "size"}
"""The attributes and methods of a parameter that depend on its shape alone."""


class EmptyParameters(TorchFunctionMode):
    """Acts on uses of empty parameters by user code within this context.

    The shape and the number of elements are those of the whole parameter. Everything else that needs its values is an
    error, unless there is an ``engine``: the parameter is then gathered, until the end of the step if autograd records
    the use.

    Args:
        names: names of the module's parameters, by the parameter's ``id``.
        engine: DeepSpeed's engine, which gathers parameters. Pass it only where every rank runs the same operators.
    """

    def __init__(self, names: Mapping[int, str], engine: Any = None) -> None:
        self._names = names
        self._engine = engine
        self._found = False
        self.unused_in: set[str] = set()
        """Names of the steps whose first run used no empty parameter, so that they need not run within this context."""

    def run_step(self, step: Callable[[], Any], name: str) -> Any:
        """Return what a step of the user's module returns, within this context."""
        self._found = False
        with self:
            output = step()
        if not self._found:
            self.unused_in.add(name)
        return output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad:
            outputs = args[0] if args else (kwargs or {})["outputs"]
            refuse_gradients_through(outputs, self._names, "DeepSpeedStrategy(stage=3)")
        arguments = (*args, *(kwargs or {}).values())
        if any(map(self._concerns, tensors_in(arguments))) and not is_called_by_library():
            return self._use(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _concerns(self, value: Any) -> bool:
        """Return whether a value is a parameter that is empty, or that backward may find empty."""
        if id(value) not in self._names:
            return False
        # Stage 3 may partition a parameter before backward if no running layer owns it.
        may_become_empty = self._engine is not None and not value.ds_active_sub_modules and not value.is_external_param
        return may_become_empty or not is_gathered(value)

    def _use(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        sets = name == "__set__"
        if name in ("__get__", "__set__", "__delete__"):
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _WITHOUT_VALUES:
            return func(*args, **kwargs)
        if name in _OF_SHAPE:
            return func(torch.empty(args[0].ds_shape, device="meta"), *args[1:], **kwargs)
        if sets or writes_in_place(func) or "out" in kwargs or self._engine is None:
            self._refuse([*args, *kwargs.values()])
        self._found = True
        concerned = list(filter(self._concerns, tensors_in([*args, *kwargs.values()])))
        with gathered_for_use(self._engine, concerned):
            return func(*args, **kwargs)

    def _refuse(self, values: list[Any]) -> None:
        name = next(self._names[id(one)] for one in tensors_in(values) if self._concerns(one))
        raise ConfigurationError(
            f"{name!r} is partitioned by DeepSpeedStrategy(stage=3), but its values were used.",
            "outside of its layer's forward, a partitioned parameter is an empty tensor.",
            "use it within 'with self.trainer.strategy.gathered(parameters):' on every rank, which keeps changes.",
        )


_PARTITIONED = (
    "the weights are partitioned, so the update changed empty tensors, but not the partitions.",
    "update the weights within deepspeed.zero.GatheredParameters(weights, modifier_rank=0), or use 'fsdp' or 'ddp'.",
)
_ROUNDED = (
    "the update changed half-precision copies, but not the float32 weights, which checkpoints save.",
    "use precision='32-true', or strategy='fsdp' or 'ddp'. To average trainable weights, use EMAWeightAveraging.",
)
"""Why an update is lost, and the fix."""


class FrozenWeights:
    """Detects in-place updates of frozen weights that would be lost, from the tensors' version counters.

    Writes through ``.data`` do not change the counters and are not detected. In single precision at stages 1 and 2,
    checkpoints save the module's own frozen weights, so no update is lost.

    Args:
        module: the user's module after DeepSpeed's setup.
        stage: ZeRO stage.
        rounded: whether the module computes with half-precision copies of the weights.
    """

    def __init__(self, module: nn.Module, stage: int, rounded: bool) -> None:
        frozen: dict[str, Any] = {name: one for name, one in module.named_parameters() if not one.requires_grad}
        self.weights = frozen if rounded or stage == 3 else {}
        """The frozen weights of which updates could be lost, by name."""
        self._strategy = f"DeepSpeedStrategy(stage={stage})"
        self._rounded = rounded
        self._note_versions()

    def _note_versions(self) -> None:
        self._counts = tuple(map(_VERSION, self.weights.values()))
        # An update within GatheredParameters changes the partition, too, and is kept unless weights are rounded.
        self._versions = {
            name: (weight._version, None if self._rounded else weight.ds_tensor._version)
            for name, weight in self.weights.items()
        }

    def lost_update(self) -> ConfigurationError | None:
        """Return the error for updates since the last call that would be lost. None if there are no such updates."""
        if tuple(map(_VERSION, self.weights.values())) == self._counts:
            return None  # in most steps, after one comparison
        before = self._versions
        self._note_versions()
        names = [
            name
            for name, (version, part) in self._versions.items()
            if version != before[name][0] and part == before[name][1]
        ]
        if not names:
            return None
        return ConfigurationError(
            f"User code updated weights under {self._strategy}: {listed(names)}.",
            *(_ROUNDED if self._rounded else _PARTITIONED),
        )
