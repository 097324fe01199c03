"""The shapes and the arithmetic of a forward pass, found without computing it.

Tensors without values go through ``forward``: nothing is computed, drawn or sent, nothing lies on a device, and a
model that has no room anywhere has shapes all the same. What ``forward`` leaves in the module is taken back.
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
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from drivetrain._runtime.generators import is_generator, preserved_generators
from drivetrain._runtime.module_modes import in_eval_mode
from drivetrain.module._example_inputs import as_call, has_forward
from drivetrain.module._run_handle import RunHandle

Shapes = tuple[tuple[int, ...], ...]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HALF_OR_WHOLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CONSTANTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)  # torch.tensor(...) in forward
_LONGEST = 100  # characters of a reason


@dataclass(slots=True)
class ForwardShapes:
    """What a forward pass goes through, by the module's name; "" is the whole.

    Attributes:
        inputs: the shapes of the tensors that the module was called with first.
        outputs: of those that it returned.
        flops: of all calls of it, with what is below.
        missing: why nothing is known; "" where it is, or nobody asked.
    """

    inputs: dict[str, Shapes] = field(default_factory=dict)
    outputs: dict[str, Shapes] = field(default_factory=dict)
    flops: Counter[str] = field(default_factory=Counter)
    missing: str = ""


def forward_shapes(module: nn.Module, example: Any, device: torch.device) -> ForwardShapes:
    """Return what ``module`` does with an example of its input, in eval mode. Communicates nothing, and never fails.

    Args:
        module: may be held in shards, on the meta device or anywhere.
        example: as `TrainModule.example_input_array`; None asks for nothing.
        device: where the module computes.
    """
    if example is None:
        return ForwardShapes()
    if not has_forward(module):
        return ForwardShapes(missing="the module has no forward")
    tensors = [*module.parameters(), *module.buffers()]
    if any(isinstance(one, UninitializedParameter | UninitializedBuffer) for one in tensors):
        return ForwardShapes(missing="lazy layers have no shape until the first batch")
    if any(isinstance(child, torch.jit.ScriptModule) for child in module.modules()):
        return ForwardShapes(missing="TorchScript cannot run on shapes alone")
    try:
        own = [one for child in module.modules() for one in vars(child).values() if is_generator(one)]
        with in_eval_mode(module), preserved_generators(device, own):
            return _pass(module, example, device)
    except Exception as error:  # whatever a user's forward may raise; no summary is worth a run
        told = " ".join(str(error).split()) or "no message"
        short = told if len(told) <= _LONGEST else f"{told[: _LONGEST - 3]}..."
        return ForwardShapes(missing=f"forward does not run on shapes alone ({type(error).__name__}: {short})")


def _pass(module: nn.Module, example: Any, device: torch.device) -> ForwardShapes:
    # Imported here: these take most of a second, and only a module with an example needs them.
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    found = ForwardShapes()
    counter = FlopCounterMode(display=False)
    with _in_plain_operations(), FakeTensorMode(), counter, _OnlyFakes(FakeTensor):
        fakes = _Fakes(device)
        with fakes.placed_in(module):
            _listen(module, found, counter)
            args, named = as_call(fakes.within(example))
            module(*args, **named)
    return found


class _Fakes:
    """Makes of each tensor one of its shape that has no values: the same one for the same tensor.

    Floating-point numbers become float32, in whatever precision the run is: no shape depends on it, and a batch need
    not be cast as a strategy would.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cpu") if device.type == "meta" else device  # of which there are no fake ones
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the tensor, whose id stays taken so

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            shape = getattr(tensor, "ds_shape", tensor.shape)  # ZeRO 3 leaves an empty tensor with its whole shape
            dtype = torch.float32 if tensor.dtype in _HALF_OR_WHOLE else tensor.dtype
            self._made[id(tensor)] = torch.empty(tuple(shape), dtype=dtype, device=self._device), tensor
        return self._made[id(tensor)][0]

    def within(self, value: Any) -> Any:
        """``value`` with such tensors in its lists and dicts, which are others then."""
        return tree_map_only(torch.Tensor, self.of, value)

    @contextmanager
    def placed_in(self, module: nn.Module) -> Iterator[None]:
        """Within it ``module`` holds nothing else, and is in no run; afterwards everything is as it was."""
        children = list(module.modules())
        kept = [(child.__dict__, dict(child.__dict__)) for child in children]
        logging_ones = [vars(child) for child in children if isinstance(child, RunHandle)]
        sharded = any(hasattr(one, "full_tensor") or hasattr(one, "ds_id") for one in module.parameters())
        try:
            for attributes, before in kept:
                for name, value in before.items():
                    if isinstance(value, torch.Tensor | list | tuple | dict | deque) and name != "_modules":
                        # Most are empty, hooks above all, for which a copy takes a tenth of the time.
                        full = isinstance(value, torch.Tensor) or len(value)
                        attributes[name] = self.within(value) if full else copy(value)
                attributes["_parameters"], attributes["_buffers"] = (
                    {name: None if one is None else self.of(one) for name, one in dict.items(before[kind])}
                    for kind in ("_parameters", "_buffers")
                )
                attributes["_modules"] = before["_modules"].copy()
                attributes["_compiled_call_impl"] = None
                attributes.pop("_trainer", None)  # which talks to other ranks
                if sharded:  # the strategy's, which gather
                    attributes.update({name: OrderedDict() for name in _HOOKS})
            for attributes in logging_ones:  # values without values are logged nowhere
                attributes["log"] = attributes["log_dict"] = _ignore
            yield
        finally:
            for attributes, before in kept:
                attributes.clear()
                attributes.update(before)


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


def _listen(module: nn.Module, found: ForwardShapes, counter: Any) -> None:
    """Take down what goes in and out of each child, and what it computes. `_Fakes` takes the hooks away again."""
    begun: list[int] = []

    def before(*ignored: Any) -> None:
        begun.append(counter.get_total_flops())

    for name, child in module.named_modules():

        def after(child: nn.Module, args: Any, named: Any, answer: Any, name: str = name) -> None:
            found.inputs.setdefault(name, _shapes((args, named)))
            found.outputs.setdefault(name, _shapes(answer))
            found.flops[name] += counter.get_total_flops() - begun.pop()

        child.register_forward_pre_hook(before)
        child.register_forward_hook(after, with_kwargs=True)


def _shapes(values: Any) -> Shapes:
    return tuple(tuple(one.shape) for one in tree_leaves(values) if isinstance(one, torch.Tensor))


class _OnlyFakes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to talk to other ranks, which do not summarize, and to touch tensors that have values."""

    def __init__(self, fake: type[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("it talks to other ranks")
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if func not in _CONSTANTS and not all(isinstance(one, self._fake) for one in given):
            raise RuntimeError("it uses a tensor that is no attribute of a module")
        return func(*args, **(kwargs or {}))


@contextmanager
def _in_plain_operations() -> Iterator[None]:
    """Within it nothing is fused to one operation whose arithmetic the counter does not know."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends: tuple[Any, ...] = (torch.backends.mkldnn, torch.backends.cudnn)  # whose recurrent layers are one
    of_fakes = logging.getLogger("torch._subclasses.fake_tensor")  # reports what fails before it raises it
    fused, enabled, silent = (
        torch.backends.mha.get_fastpath_enabled(),
        [one.enabled for one in backends],
        of_fakes.disabled,
    )
    try:
        of_fakes.disabled = True
        torch.backends.mha.set_fastpath_enabled(False)
        for backend in backends:
            backend.enabled = False
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        of_fakes.disabled = silent
        torch.backends.mha.set_fastpath_enabled(fused)
        for backend, before in zip(backends, enabled, strict=True):
            backend.enabled = before
