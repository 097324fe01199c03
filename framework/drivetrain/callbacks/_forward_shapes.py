"""Shapes and FLOPs of a forward pass, derived without computing it.

``forward`` runs on `FakeTensor` objects, so it needs no device memory, computes nothing, draws no random numbers and
communicates nothing. Changes that ``forward`` makes to the module's attributes are undone.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from drivetrain._module.example_inputs import example_arguments, has_forward
from drivetrain._runtime.generators import is_generator, preserved_generators
from drivetrain._runtime.module_modes import in_eval_mode

Shapes = tuple[tuple[int, ...], ...]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_FLOATING_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CONSTANTS = (
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift_fresh_copy.default,
)  # the operators that torch.tensor(...) in forward calls


@dataclass(slots=True)
class ForwardShapes:
    """Shapes and FLOPs of a forward pass by submodule name; "" is the module itself.

    Attributes:
        inputs: shapes of the tensors that the submodule was called with first.
        outputs: shapes of the tensors that the submodule's first call returned.
        flops: FLOPs of all calls of the submodule, including those of its children.
        missing_reason: why shapes and FLOPs are unknown; "" if they are known.
    """

    inputs: dict[str, Shapes] = field(default_factory=dict)
    outputs: dict[str, Shapes] = field(default_factory=dict)
    flops: Counter[str] = field(default_factory=Counter)
    missing_reason: str = ""


def forward_shapes(module: nn.Module, example: Any, device: torch.device) -> ForwardShapes:
    """Return the shapes and FLOPs of ``module`` called with an example, in eval mode.

    This function is not a collective operation, and never raises an error.

    Args:
        module: the module; its weights may be sharded or on the meta device.
        example: `TrainModule.example_input_array`.
        device: the device on which the module computes.
    """
    if not has_forward(module):
        return ForwardShapes(missing_reason="the module has no forward")
    try:
        generators = [value for child in module.modules() for value in vars(child).values() if is_generator(value)]
        with in_eval_mode(module), preserved_generators(device, generators):
            return _run_forward(module, example, device)
    except Exception as error:  # A user's forward may raise any error, but a summary must not end a run.
        message = " ".join(str(error).split())
        reason = f"forward does not run on shapes alone ({type(error).__name__}: {message:.100})"
        return ForwardShapes(missing_reason=reason)


def _run_forward(module: nn.Module, example: Any, device: torch.device) -> ForwardShapes:
    # These imports take most of a second, and only modules with an example need them.
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    result = ForwardShapes()
    counter = FlopCounterMode(display=False)
    with _without_fused_kernels(), FakeTensorMode(), counter, _FakeTensorsOnly(FakeTensor):
        fakes = _FakeTensors(device)
        with fakes.installed_in(module):
            _record_shapes(module, result, counter)
            args, kwargs = example_arguments(fakes.convert(example))
            module(*args, **kwargs)
    return result


class _FakeTensors:
    """Maps each tensor to one fake tensor, however often the tensor occurs.

    Floating-point tensors become float32 in every precision of the run, so the example need not be cast.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cpu") if device.type == "meta" else device  # A fake tensor cannot be on meta.
        # Each entry also holds the original tensor, so that the id of this tensor is not reused.
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def convert_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._fakes:
            # ZeRO 3 parameters are empty; ds_shape is the whole shape.
            shape = getattr(tensor, "ds_shape", tensor.shape)
            dtype = torch.float32 if tensor.dtype in _FLOATING_DTYPES else tensor.dtype
            self._fakes[id(tensor)] = torch.empty(tuple(shape), dtype=dtype, device=self._device), tensor
        return self._fakes[id(tensor)][0]

    def convert(self, value: Any) -> Any:
        """Return a copy of ``value``, including nested lists and dicts, in which all tensors are fake tensors."""
        return tree_map_only(torch.Tensor, self.convert_tensor, value)

    @contextmanager
    def installed_in(self, module: nn.Module) -> Iterator[None]:
        """Context manager that replaces the tensors of ``module`` by fake tensors and disconnects it from its run."""
        children = list(module.modules())
        saved = [(child.__dict__, dict(child.__dict__)) for child in children]
        sharded = any(hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_id") for tensor in module.parameters())
        try:
            for attributes, before in saved:
                for name, value in before.items():
                    if isinstance(value, torch.Tensor | list | tuple | dict | deque) and name != "_modules":
                        # Most containers, such as those of hooks, are empty, and `copy` is ten times faster for them.
                        is_filled = isinstance(value, torch.Tensor) or len(value)
                        attributes[name] = self.convert(value) if is_filled else copy(value)
                attributes["_parameters"], attributes["_buffers"] = (
                    {
                        name: None if tensor is None else self.convert_tensor(tensor)
                        for name, tensor in dict.items(before[kind])
                    }
                    for kind in ("_parameters", "_buffers")
                )
                attributes["_modules"] = before["_modules"].copy()
                attributes["_compiled_call_impl"] = None
                attributes.pop("_trainer", None)  # The trainer communicates with other ranks, and logs.
                if sharded:  # The strategy's hooks would gather weights.
                    attributes.update({name: OrderedDict() for name in _HOOKS})
            yield
        finally:
            for attributes, before in saved:
                attributes.clear()
                attributes.update(before)


def _record_shapes(module: nn.Module, result: ForwardShapes, counter: Any) -> None:
    """Add hooks that record each submodule's shapes and FLOPs. `_FakeTensors.installed_in` removes them."""
    flops_before: list[int] = []

    def before(*ignored: Any) -> None:
        flops_before.append(counter.get_total_flops())

    for name, child in module.named_modules():

        def after(child: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            result.inputs.setdefault(name, _shapes((args, kwargs)))
            result.outputs.setdefault(name, _shapes(output))
            result.flops[name] += counter.get_total_flops() - flops_before.pop()

        child.register_forward_pre_hook(before)
        child.register_forward_hook(after, with_kwargs=True)


def _shapes(values: Any) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in tree_leaves(values) if isinstance(tensor, torch.Tensor))


class _FakeTensorsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises an error at collectives, in which other ranks would not take part, and at operations on real tensors."""

    def __init__(self, fake: type[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("forward communicates with other ranks")
        tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        if func not in _CONSTANTS and not all(isinstance(tensor, self._fake) for tensor in tensors):
            raise RuntimeError("forward uses a tensor that is not an attribute of a module")
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_fused_kernels() -> Iterator[None]:
    """Disable fused kernels, whose FLOPs the counter does not know."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    switches: list[tuple[Any, str, bool]] = [
        (torch.backends.mkldnn, "enabled", False),  # This backend and cuDNN fuse recurrent layers.
        (torch.backends.cudnn, "enabled", False),
        (logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True),  # logs each error before raising it
    ]
    before = [getattr(owner, name) for owner, name, _ in switches]
    fastpath_enabled = torch.backends.mha.get_fastpath_enabled()
    try:
        for owner, name, value in switches:
            setattr(owner, name, value)
        torch.backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath_enabled)
        for (owner, name, _), value in zip(switches, before, strict=True):
            setattr(owner, name, value)
