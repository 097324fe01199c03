"""Builds a module without storage, and later gives each of its tensors the values that it would have had.

What is guaranteed: every operation that ``configure_model`` ran on tensors is run again, in the same order, on the CPU
and from the same state of torch's generator, so that each value is, bit for bit, what building the module there gives,
whatever initialises it: constructors, ``reset_parameters``, or a loop over all parameters at the end. A tensor has
storage only from the operation that first writes what is still needed of it to the last one that touches it; then it is
handed on, to be cut to a shard, and let go. What cannot be told without values (``.item()``, a branch on a value) fails
on the meta device at once, and numbers drawn for real tensors in between are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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

_OVERWRITES = {"uniform_", "normal_", "fill_", "zero_", "copy_", "random_", "exponential_", "log_normal_", "cauchy_"}
"""In-place operations that do not look at what was there before."""

_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]

_INITIALISERS = {unwrap(one).__code__: one for one in vars(nn.init).values() if isinstance(one, FunctionType)}
"""Torch's functions that initialise a tensor, their first argument, by the code that runs."""

_CONSTANTS = (torch.tensor, torch.as_tensor, torch.asarray)


_Origin = None | int | torch.Tensor
"""Where random numbers come from: where the generator stands, where it stood after a call of that number, or a seed."""


@dataclass(slots=True)
class _Call:
    """An operation, one of torch's initialisers, or with ``operation`` None a constant made of Python numbers."""

    operation: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    outputs: list[torch.Tensor]
    constant: torch.Tensor | None = None
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)  # of new tensors, as the call was made
    origin: _Origin = None


@dataclass(slots=True)
class Recording:
    """What happened to tensors without storage.

    Attributes:
        generator: torch's CPU generator's state as it began.
        calls: in order.
        final: where the generator stands in the end.
    """

    generator: torch.Tensor
    calls: list[_Call] = field(default_factory=list)
    final: _Origin = None

    def storages(self) -> set[int]:
        """What was made while recording."""
        return {_key(output) for call in self.calls for output in call.outputs if output.is_meta}


@contextmanager
def without_storage() -> Iterator[Recording]:
    """Within it what is built has no storage, and what initialises it is recorded.

    Raises:
        ConfigurationError: something needed values.
    """
    recording = Recording(torch.get_rng_state())
    try:
        with torch.device("meta"), _Recorder(recording) as recorder, _Constants(recorder):
            yield recording
        recording.final = recorder.origin()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error).lower():
            raise
        raise ConfigurationError(
            f"configure_model failed on the meta device: {error}",
            "what it builds has no storage yet, so that no rank ever holds the whole; nothing there can see values.",
            "leave values alone in configure_model, or build with storage: the strategy's meta=False.",
        ) from error
    finally:
        torch.set_rng_state(recording.generator)


class Building:
    """How a run's module is built: keeps the recording, where there is one, for whoever gives the module storage."""

    def __init__(self) -> None:
        self._recording: Recording | None = None

    @contextmanager
    def without_storage(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """Within ``context`` and `without_storage`; what was recorded is kept if nothing raised."""
        with context, without_storage() as recording:
            yield
        self._recording = recording

    def take(self) -> Recording | None:
        """Hand over what was recorded, and hold it no longer: it keeps tensors alive."""
        recording, self._recording = self._recording, None
        return recording


class _Recorder(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording
        # Nothing is drawn for what has no storage. A number drawn after each call instead marks where the generator
        # would stand: so it shows when it is seeded, or put back (`torch.random.fork_rng`), in between.
        self._stands = recording.generator.numpy().tobytes()
        self._known = {self._stands: -1}

    def origin(self) -> _Origin:
        """Where the next random numbers come from."""
        state = torch.get_rng_state()
        key = state.numpy().tobytes()
        return None if key == self._stands else self._known.get(key, state)

    def draw(self, call: _Call) -> None:
        """Record a call that takes random numbers."""
        call.origin = self.origin()
        self.recording.calls.append(call)
        torch.rand(1, device="cpu")
        self._stands = torch.get_rng_state().numpy().tobytes()
        self._known[self._stands] = len(self.recording.calls) - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        random = torch.Tag.nondeterministic_seeded in func.tags
        if any(tensor.is_meta for tensor in (*tensors, *outputs)):
            call = _Call(func, *_as_they_are((args, kwargs, outputs)))
            if random:
                self.draw(call)
            else:
                self.recording.calls.append(call)
        elif random:
            raise ConfigurationError(
                f"configure_model drew random numbers for a tensor that has storage ({func}).",
                "what is built there has none and is initialised later: the generator would give other numbers.",
                "draw them in __init__, or build with storage: the strategy's meta=False.",
            )
        return result


def _as_they_are(values: Any) -> Any:
    """Aliases of tensors without storage: a precision that casts a parameter later puts another tensor into it."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach() if tensor.is_meta else tensor, values)


class _Constants(TorchFunctionMode):
    """Tensors made of Python numbers, whose values never pass through an operation."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == _IS_META:
            self._record_initialiser(sys._getframe(1))
        if func not in _CONSTANTS or kwargs.get("device") not in (None, "meta", torch.device("meta")):
            return func(*args, **kwargs)
        real = func(*args, **{**kwargs, "device": "cpu"})
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_flatten(args)[0]):
            return func(*args, **kwargs)
        meta = torch.empty_like(real, device="meta")
        self._recorder.recording.calls.append(_Call(None, (), {}, [meta], real.detach()))
        return meta.requires_grad_(real.requires_grad)

    def _record_initialiser(self, frame: FrameType) -> None:
        """Record those of torch's initialisers that look at values (``trunc_normal_``) as a whole.

        They ask whether their tensor has storage, and do nothing where it has none.
        """
        code, values = frame.f_code, frame.f_locals
        if code not in _INITIALISERS:
            return
        first, *others = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        tensor, options = values[first], {name: values[name] for name in others}
        if not _is_meta(tensor):
            return
        with torch.utils._python_dispatch._disable_current_modes():
            self._recorder.draw(_Call(_INITIALISERS[code], (tensor.detach(),), options, []))


@torch.no_grad()
def replay(
    recording: Recording, wanted: list[torch.Tensor], hand_over: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    """Run what was recorded, on the CPU and from the present state of its generator.

    Args:
        recording: of `without_storage`.
        wanted: tensors without storage whose values are asked for.
        hand_over: called as ``hand_over(tensor, value)`` once for each, as soon as its value is final.
    """
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in wanted:
        by_storage.setdefault(_key(tensor), []).append(tensor)
    touches = [_touched(call) for call in recording.calls]
    later: dict[int, list[int]] = {}
    for number, touched in enumerate(touches):
        for key in touched:
            later.setdefault(key, []).append(number)
    overwritten = [_overwritten(call) for call in recording.calls]
    storages: dict[int, torch.UntypedStorage] = {}

    def real(meta: torch.Tensor) -> torch.Tensor:
        if not meta.is_meta:
            return meta
        key = _key(meta)
        if key not in storages:
            storages[key] = torch.UntypedStorage(meta.untyped_storage().nbytes())  # type: ignore[no-untyped-call]
        empty = torch.empty(0, dtype=meta.dtype)
        return empty.set_(storages[key], meta.storage_offset(), meta.size(), meta.stride())

    origins = [*(call.origin for call in recording.calls), recording.final]
    returned_to = {origin for origin in origins if isinstance(origin, int)}
    states = {-1: torch.get_rng_state()}

    def go_to(origin: _Origin) -> None:
        if origin is not None:
            torch.set_rng_state(states[origin] if isinstance(origin, int) else origin)

    for number, (call, touched) in enumerate(zip(recording.calls, touches, strict=True)):
        go_to(call.origin)
        if touched:
            with DefaultDtype(call.dtype):
                _run(call, real, storages)
        if number in returned_to:
            states[number] = torch.get_rng_state()
        for key in touched:
            coming = later[key]
            coming.pop(0)
            if not coming:
                for tensor in by_storage.get(key, ()):
                    hand_over(tensor, real(tensor))
                storages.pop(key, None)
            elif overwritten[coming[0]] == key:
                storages.pop(key, None)
    go_to(recording.final)


def _run(call: _Call, real: Callable[[torch.Tensor], torch.Tensor], storages: dict[int, torch.UntypedStorage]) -> None:
    if call.operation is None:
        (meta,) = call.outputs
        assert call.constant is not None
        real(meta).copy_(call.constant)
        return
    arguments, options = tree_map_only(torch.Tensor, real, (call.arguments, call.options))
    if "device" in options:
        options["device"] = torch.device("cpu")
    if isinstance(call.operation, FunctionType):
        call.operation(*arguments, **options)
        return
    inputs = {_key(leaf) for leaf in tree_flatten((call.arguments, call.options))[0] if _is_meta(leaf)}
    results = [
        leaf for leaf in tree_flatten(call.operation(*arguments, **options))[0] if isinstance(leaf, torch.Tensor)
    ]
    for meta, result in zip(call.outputs, results, strict=True):
        if meta.is_meta and _key(meta) not in inputs:
            storages[_key(meta)] = result.untyped_storage()


def _touched(call: _Call) -> list[int]:
    """The storages that a call reads or writes; none for a view, and none for storage that is only set aside."""
    if call.operation is None:
        return [_key(call.outputs[0])]
    if isinstance(call.operation, FunctionType):
        return [_key(call.arguments[0])]
    name = call.operation._schema.name.removeprefix("aten::")
    inputs = [_key(leaf) for leaf in tree_flatten((call.arguments, call.options))[0] if _is_meta(leaf)]
    outputs = [_key(output) for output in call.outputs if output.is_meta]
    if name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"):
        return []
    if call.outputs and not call.operation._schema.is_mutable and set(outputs) <= set(inputs):
        return []
    return list(dict.fromkeys([*inputs, *outputs]))


def _overwritten(call: _Call) -> int | None:
    """The storage all of whose values a call replaces without a look at them."""
    if call.operation is None:
        return _key(call.outputs[0])
    initialises = isinstance(call.operation, FunctionType)
    name = "" if initialises else call.operation._schema.name.removeprefix("aten::")
    if not (initialises or name in _OVERWRITES) or not call.arguments or not _is_meta(call.arguments[0]):
        return None
    target = call.arguments[0]
    whole = target.numel() * target.element_size() == target.untyped_storage().nbytes()
    others = {_key(leaf) for leaf in tree_flatten((call.arguments[1:], call.options))[0] if _is_meta(leaf)}
    return _key(target) if whole and _key(target) not in others else None


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


# A module's tensors


@dataclass(slots=True)
class Bare:
    """A tensor of a module that has no storage yet.

    Attributes:
        name: where it stands.
        tensor: as it was built.
        place: puts a value in its place.
    """

    name: str
    tensor: torch.Tensor
    place: Callable[[torch.Tensor], None] | None


def bare_tensors(module: nn.Module, recording: Recording | None) -> list[Bare]:
    """What of ``module`` has no storage: parameters (without a ``place``), buffers, and tensors kept as attributes.

    Raises:
        ConfigurationError: one was not built in ``configure_model``, so that nobody knows its values.
    """
    found: list[Bare] = []
    for prefix, child in module.named_modules():
        for kind, store in (("parameter", child._parameters), ("buffer", child._buffers), ("", child.__dict__)):
            for key, value in store.items():
                if not _is_meta(value):
                    continue
                place = None if kind == "parameter" else _placer(store, key)
                found.append(Bare(f"{prefix}.{key}" if prefix else key, value, place))
    known = set() if recording is None or not found else recording.storages()
    unknown = [bare.name for bare in found if _key(bare.tensor) not in known]
    if unknown:
        raise ConfigurationError(
            f"{len(unknown)} tensor(s) have no storage and nobody to initialise them: {', '.join(unknown[:10])}.",
            "what is built on the meta device outside configure_model leaves no trace of how.",
            "build them in configure_model, where the strategy sees it.",
        )
    return found


def _placer(store: dict[str, Any], key: str) -> Callable[[torch.Tensor], None]:
    def place(value: torch.Tensor) -> None:
        store[key] = value

    return place
