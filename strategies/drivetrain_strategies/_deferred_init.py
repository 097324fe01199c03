"""Records how ``configure_model`` builds a module on the meta device, and replays the build one tensor at a time.

The replay runs every recorded tensor operation on the CPU, in the same order and from the same generator state. Each
value therefore equals the value of an ordinary build bit for bit, regardless of whether constructors,
``reset_parameters`` or a loop over all parameters initialises the tensor. A tensor has storage only from the first
operation that writes the tensor to the last operation that reads or writes it. The caller then receives the final
value and cuts a shard from it, and the storage is freed. Code that needs values (``.item()``, a branch on a value)
fails on the meta device, and drawing random numbers for tensors with storage raises an error.

`_OperationRecorder` records operations. `_FunctionRecorder` records what a dispatch mode does not see: tensors created
from Python numbers, and the functions of ``torch.nn.init`` that return at once for a meta tensor (``trunc_normal_``,
``orthogonal_``, ``dirac_``, ``sparse_``). It recognises such a function by the frame that reads ``tensor.is_meta``. If
these functions were not recorded, the weights that they initialise and all later random numbers would silently differ
from an ordinary build.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from inspect import unwrap
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from drivetrain.errors import ConfigurationError
from drivetrain.precision import DefaultDtype
from drivetrain.strategies import ControlPlane

_OVERWRITES = {"uniform_", "normal_", "fill_", "zero_", "copy_", "random_", "exponential_", "log_normal_", "cauchy_"}
"""In-place operations that overwrite all values without reading them, as the functions of ``torch.nn.init`` do."""

_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
"""The getter of ``tensor.is_meta``, which a `TorchFunctionMode` receives when code reads the attribute."""

_INITIALISERS = {
    unwrap(function).__code__: function for function in vars(nn.init).values() if isinstance(function, FunctionType)
}
"""The functions of ``torch.nn.init``, by their code object. The first argument of each is the tensor."""

_CONSTANT_FUNCTIONS = (torch.tensor, torch.as_tensor, torch.asarray)
"""The functions that create a tensor from Python numbers."""

_GeneratorOrigin = None | int | torch.Tensor
"""The generator state from which a random call draws.

None is the state that the previous random call left, an int is the state after the call with that index (-1 is the
state when the recording began), and a tensor is the state itself.
"""


class DeferredModule:
    """A module that ``configure_model`` builds on the meta device. `materialize` gives its tensors their values."""

    def __init__(self) -> None:
        self._recording: Recording | None = None
        self._meta_tensors: list[MetaTensor] = []

    @contextmanager
    def record_on_meta(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """Build on the meta device within ``context``, and record how tensors are initialised.

        Raises:
            ConfigurationError: the code needed values of a tensor.
        """
        with context:
            recording = Recording(torch.get_rng_state())
            try:
                with torch.device("meta"), _OperationRecorder(recording) as recorder, _FunctionRecorder(recorder):
                    yield
                recording.final_origin = recorder.origin()
            except (NotImplementedError, RuntimeError) as error:
                if re.search(r"\bmeta\b", str(error), re.IGNORECASE) is None:
                    raise
                raise ConfigurationError(
                    f"configure_model failed on the meta device: {error}",
                    "to save memory, configure_model runs on the meta device, where tensors have no values.",
                    "do not read tensor values in configure_model, or pass meta=False to the strategy.",
                ) from error
            finally:
                torch.set_rng_state(recording.generator)
        self._recording = recording

    def find_in(self, module: nn.Module) -> bool:
        """Find the meta tensors of ``module``, before a precision converts them. Return whether there are any.

        Raises:
            ConfigurationError: see `find_meta_tensors`.
        """
        self._meta_tensors = find_meta_tensors(module, self._recording)
        if not self._meta_tensors:
            self._recording = None  # it keeps tensors alive
        return bool(self._meta_tensors)

    @torch.no_grad()
    def materialize(
        self, assign_parameter: Callable[[str, torch.Tensor], None], device: torch.device, control: ControlPlane
    ) -> None:
        """Replay the build from the generator state with which rank 0 began it. Collective.

        The generator is left as an ordinary build leaves it, unless it was in another state on this rank.

        Args:
            assign_parameter: called once with the name and the value of each parameter. Of tied names, it gets the
                first. Other tensors are assigned to the module.
            device: the device of tensors other than parameters.
            control: the control plane.
        """
        recording, meta_tensors = self._recording, self._meta_tensors
        self._recording, self._meta_tensors = None, []
        if recording is None:
            return
        for store, key in (slot for meta_tensor in meta_tensors for slot in meta_tensor.slots):
            if store[key].grad_fn is not None:
                store[key].detach_()  # a graph would refer to parameters, which a strategy may have to swap
        state = torch.tensor(control.broadcast_object(recording.generator.tolist()), dtype=torch.uint8)
        state_before = torch.get_rng_state()
        torch.set_rng_state(state)
        for meta_tensor, value in _Replay(recording).values_of(meta_tensors):
            if meta_tensor.slots:
                meta_tensor.assign(value, device)
            else:
                assign_parameter(meta_tensor.name, value)
            del value  # before the next tensor gets storage
        if not torch.equal(state, recording.generator) or not torch.equal(state_before, recording.generator):
            torch.set_rng_state(state_before)


# Recording


@dataclass(slots=True)
class _Call:
    """A recorded call of an operator or of a function of ``torch.nn.init``. Its tensors may be meta tensors."""

    operation: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    outputs: list[torch.Tensor]
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)  # the default dtype at the time of the call
    origin: _GeneratorOrigin = None

    @property
    def _name(self) -> str:
        """The operator's name, or "" for a function of ``torch.nn.init``."""
        return "" if isinstance(self.operation, FunctionType) else self.operation._schema.name.removeprefix("aten::")

    def inputs(self, first: int = 0) -> list[int]:
        """Return the keys of the storages of the arguments from the given one on."""
        leaves = tree_flatten((self.arguments[first:], self.options))[0]
        return [_storage_key(leaf) for leaf in leaves if _is_meta(leaf)]

    def touched_storages(self) -> list[int]:
        """Return the keys of the storages that the call reads or writes. Views and empty allocations do neither."""
        if self._name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"):
            return []
        touched = dict.fromkeys([*self.inputs(), *(_storage_key(one) for one in self.outputs if one.is_meta)])
        is_view = self._name and self.outputs and not self.operation._schema.is_mutable
        return [] if is_view and touched.keys() <= set(self.inputs()) else list(touched)

    def overwritten_storage(self) -> int | None:
        """Return the key of the storage that the call overwrites completely without reading it, or None."""
        overwrites = self._name in _OVERWRITES or not self._name
        if not overwrites or not self.arguments or not _is_meta(self.arguments[0]):
            return None
        target = self.arguments[0]
        covers_storage = target.numel() * target.element_size() == target.untyped_storage().nbytes()
        key = _storage_key(target)
        return key if covers_storage and key not in self.inputs(first=1) else None


@dataclass(slots=True)
class Recording:
    """The recorded calls on meta tensors.

    Attributes:
        generator: state of torch's CPU generator when the recording began.
        calls: the recorded calls, in order.
        final_origin: generator state after the last call, as a `_GeneratorOrigin`.
    """

    generator: torch.Tensor
    calls: list[_Call] = field(default_factory=list)
    final_origin: _GeneratorOrigin = None

    def storages(self) -> set[int]:
        """Return the keys of all storages created during the recording."""
        return {_storage_key(output) for call in self.calls for output in call.outputs if output.is_meta}


class _OperationRecorder(TorchDispatchMode):
    """Records every operator that has a meta tensor among its inputs or outputs."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording
        # Random operators draw nothing for meta tensors. Instead, one number is drawn after each random call, and the
        # resulting generator state identifies the call. If the state is not the one expected, it was set in
        # between, by seeding or by `torch.random.fork_rng`.
        self._expected_state = recording.generator.numpy().tobytes()
        self._call_by_state = {self._expected_state: -1}

    def origin(self) -> _GeneratorOrigin:
        """Return the generator state from which the next random numbers are drawn."""
        state = torch.get_rng_state()
        key = state.numpy().tobytes()
        return None if key == self._expected_state else self._call_by_state.get(key, state)

    def record_random(self, call: _Call) -> None:
        """Record a call that draws random numbers."""
        call.origin = self.origin()
        self.recording.calls.append(call)
        torch.rand(1, device="cpu")
        self._expected_state = torch.get_rng_state().numpy().tobytes()
        self._call_by_state[self._expected_state] = len(self.recording.calls) - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        random = torch.Tag.nondeterministic_seeded in func.tags
        if any(tensor.is_meta for tensor in (*tensors, *outputs)):
            call = _Call(func, *_detached_meta((args, kwargs, outputs)))
            if random:
                self.record_random(call)
            else:
                self.recording.calls.append(call)
        elif random:
            raise ConfigurationError(
                f"configure_model drew random numbers for a tensor that has storage ({func}).",
                "modules are initialised only after configure_model, so these numbers would be drawn in another order.",
                "draw these numbers in __init__, or pass meta=False to the strategy.",
            )
        return result


def _detached_meta(values: Any) -> Any:
    """Replace meta tensors by aliases, since a precision that casts a parameter replaces the parameter's data."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach() if tensor.is_meta else tensor, values)


class _FunctionRecorder(TorchFunctionMode):
    """Records tensors created from Python numbers, and initialisers that return at once for a meta tensor."""

    def __init__(self, recorder: _OperationRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == _IS_META:
            self._record_initialiser(sys._getframe(1))
        if func not in _CONSTANT_FUNCTIONS or kwargs.get("device") not in (None, "meta", torch.device("meta")):
            return func(*args, **kwargs)
        materialized = func(*args, **{**kwargs, "device": "cpu"})
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_flatten(args)[0]):
            return func(*args, **kwargs)
        meta = torch.empty_like(materialized, device="meta")
        copy = _Call(torch.ops.aten.copy_.default, (meta, materialized.detach()), {}, [meta])
        self._recorder.recording.calls.append(copy)
        return meta.requires_grad_(materialized.requires_grad)

    def _record_initialiser(self, frame: FrameType) -> None:
        """Record a ``torch.nn.init`` function as one call, if ``frame`` runs one.

        These functions read ``tensor.is_meta`` and return at once for a meta tensor, so no operator is dispatched.
        """
        code, values = frame.f_code, frame.f_locals
        if code not in _INITIALISERS:
            return
        first, *others = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        tensor, options = values[first], {name: values[name] for name in others}
        if not _is_meta(tensor):
            return
        with torch.utils._python_dispatch._disable_current_modes():
            tensor = tensor.detach()
            self._recorder.record_random(_Call(_INITIALISERS[code], (tensor,), options, [tensor]))


# Replay


class _Replay:
    """Runs the recorded calls on the CPU, from the generator's current state."""

    def __init__(self, recording: Recording) -> None:
        self._calls = recording.calls
        self._origins = [*(call.origin for call in recording.calls), recording.final_origin]
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._states = {-1: torch.get_rng_state()}

    def values_of(self, meta_tensors: list[MetaTensor]) -> Iterator[tuple[MetaTensor, torch.Tensor]]:
        """Yield each meta tensor with its value, as soon as the value is final."""
        by_storage: dict[int, list[MetaTensor]] = {}
        for meta_tensor in meta_tensors:
            by_storage.setdefault(_storage_key(meta_tensor.tensor), []).append(meta_tensor)
        touched_storages = [call.touched_storages() for call in self._calls]
        later_calls: dict[int, list[int]] = {}
        for number, keys in enumerate(touched_storages):
            for key in keys:
                later_calls.setdefault(key, []).append(number)
        returned_to = {origin for origin in self._origins if isinstance(origin, int)}
        for number, (call, keys) in enumerate(zip(self._calls, touched_storages, strict=True)):
            self._restore_generator(call.origin)
            if keys:
                with DefaultDtype(call.dtype):
                    self._run(call)
            if number in returned_to:
                self._states[number] = torch.get_rng_state()
            for key in keys:
                remaining = later_calls[key]
                remaining.pop(0)
                if not remaining:
                    yield from self._taken(by_storage.get(key, ()))
                if not remaining or self._calls[remaining[0]].overwritten_storage() == key:
                    self._storages.pop(key, None)
        for key in by_storage.keys() - later_calls.keys():  # tensors that are left uninitialised, as by torch.empty
            yield from self._taken(by_storage[key])
            self._storages.pop(key, None)
        self._restore_generator(self._origins[-1])

    def _taken(self, meta_tensors: Iterable[MetaTensor]) -> Iterator[tuple[MetaTensor, torch.Tensor]]:
        return ((meta_tensor, self._materialized(meta_tensor.tensor)) for meta_tensor in meta_tensors)

    def _restore_generator(self, origin: _GeneratorOrigin) -> None:
        if origin is not None:
            torch.set_rng_state(self._states[origin] if isinstance(origin, int) else origin)

    def _materialized(self, meta: torch.Tensor) -> torch.Tensor:
        if not meta.is_meta:
            return meta
        key = _storage_key(meta)
        if key not in self._storages:
            self._storages[key] = torch.UntypedStorage(meta.untyped_storage().nbytes())  # type: ignore[no-untyped-call]
        empty = torch.empty(0, dtype=meta.dtype)
        return empty.set_(self._storages[key], meta.storage_offset(), meta.size(), meta.stride())

    def _run(self, call: _Call) -> None:
        arguments, options = tree_map_only(torch.Tensor, self._materialized, (call.arguments, call.options))
        if "device" in options:
            options["device"] = torch.device("cpu")
        results = tree_flatten(call.operation(*arguments, **options))[0]
        inputs = set(call.inputs())
        tensors = [leaf for leaf in results if isinstance(leaf, torch.Tensor)]
        for meta, result in zip(call.outputs, tensors, strict=True):
            if not meta.is_meta or _storage_key(meta) in inputs:
                continue
            if result.stride() == meta.stride() and result.storage_offset() == meta.storage_offset():
                self._storages[_storage_key(meta)] = result.untyped_storage()
            else:  # as with torch.linalg.svd: later calls view the storage in the layout of the meta tensor
                self._materialized(meta).copy_(result)


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclass(slots=True)
class MetaTensor:
    """A parameter, buffer or attribute of a module that is a meta tensor.

    Attributes:
        name: qualified name of the tensor in the module. A tied parameter has the first of its names.
        tensor: an alias of the meta tensor, as it was built: a precision may change the dtype of a parameter. It is
            made by ``data``, since an alias by ``detach`` would count as a use of the tensor.
        slots: the dicts and lists that hold the tensor, each with its key there; empty for a parameter.
    """

    name: str
    tensor: torch.Tensor
    slots: list[tuple[Any, Any]]

    def assign(self, value: torch.Tensor, device: torch.device) -> None:
        """Store ``value`` in all slots, on ``device`` and in the dtype of the tensor that is there now."""
        by_dtype: dict[torch.dtype, torch.Tensor] = {}
        for store, key in self.slots:
            dtype = store[key].dtype
            store[key] = by_dtype.setdefault(dtype, value.to(device, dtype))


def find_meta_tensors(module: nn.Module, recording: Recording | None) -> list[MetaTensor]:
    """Return the meta tensors of ``module``: parameters, buffers, and tensors in attributes.

    Tensors are found in lists, dicts and objects too, at any depth.

    Raises:
        ConfigurationError: a tensor was not built in ``configure_model``, so its values are unknown, or it cannot be
            replaced. The error names it.
    """
    named = dict(module.named_parameters())
    parameters = [MetaTensor(name, parameter.data, []) for name, parameter in named.items() if parameter.is_meta]
    others: dict[int, MetaTensor] = {}
    problems: list[str] = []
    seen = set(map(id, module.modules()))
    registered = set(map(id, named.values()))

    def search(name: str, value: Any, store: Any, key: Any) -> None:
        if isinstance(value, torch.Tensor):
            if not value.is_meta or id(value) in registered:
                return
            if isinstance(store, tuple) or isinstance(value, nn.Parameter):
                problems.append(f"{name!r} is in a tuple, or a parameter that no module has registered")
            else:
                others.setdefault(id(value), MetaTensor(name, value.data, [])).slots.append((store, key))
        elif id(value) not in seen and _may_hold_tensors(value):
            seen.add(id(value))
            if isinstance(value, dict | list | tuple):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for inner, item in list(items):
                    search(f"{name}[{inner!r}]", item, value, inner)
            else:
                for inner, item in list(vars(value).items()):
                    search(f"{name}.{inner}", item, vars(value), inner)

    for prefix, child in module.named_modules():
        prefix = f"{prefix}." if prefix else ""
        seen.update(map(id, (child._parameters, child._buffers, child._modules)))
        for store in (child._buffers, vars(child)):
            for key, value in list(store.items()):
                # Only what was recorded can be below attributes. Without a recording, a long search is of no use.
                if recording is not None or isinstance(value, torch.Tensor):
                    search(f"{prefix}{key}", value, store, key)
    meta_tensors = [*parameters, *others.values()]
    name_by_storage = {_storage_key(parameter.tensor): parameter.name for parameter in parameters}
    recorded = set() if recording is None or not meta_tensors else recording.storages()
    for one in meta_tensors:
        key = _storage_key(one.tensor)
        if one.slots and key in name_by_storage:
            problems.append(f"{one.name!r} shares the memory of {name_by_storage[key]!r}, which gets other storage")
        elif key not in recorded:
            problems.append(f"{one.name!r} was not built in configure_model")
    if problems:
        raise ConfigurationError(
            f"Tensors on the meta device cannot be initialised: {'; '.join(problems[:10])}.",
            "to save memory, configure_model runs on the meta device, and the tensors that it builds get their values "
            "afterwards.",
            "build them in configure_model, as buffers or parameters or in lists, or pass meta=False to the strategy.",
        )
    return meta_tensors


def _may_hold_tensors(value: Any) -> bool:
    """Return whether to search ``value``: a container, or an object of the user's that has attributes."""
    if isinstance(value, dict | list | tuple):
        return True
    defined_in = type(value).__module__.partition(".")[0]
    own = isinstance(value, nn.Module) or defined_in not in ("builtins", "torch", "drivetrain", "drivetrain_strategies")
    return own and hasattr(value, "__dict__")
