"""Passes saved weights through a module's own loading hooks, before names and shapes are compared."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter, is_lazy

from drivetrain._parameters.module_description import layer_versions
from drivetrain._parameters.weights_fit import WeightMismatch
from drivetrain._runtime.plain_names import plain_name
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain._format import Weights


def with_versions(
    module: nn.Module, state: Mapping[str, Any], versions: Mapping[str, int] | None
) -> OrderedDict[str, Any]:
    """Return a state dict whose ``_metadata`` tells the loading hooks of ``module`` which versions wrote it.

    Args:
        module: the module that loads the state.
        state: values by name.
        versions: a result of `layer_versions`; None if the versions were not recorded, as in state dicts of old files.
    """
    result = OrderedDict(state)
    if versions is not None:
        names = {_plain(name) for name, _ in module.named_modules(remove_duplicate=False)} | versions.keys()
        result._metadata = {name: {"version": versions.get(name, 1)} for name in names}  # type: ignore[attr-defined]
    return result


@dataclass(frozen=True, slots=True)
class HookedWeights:
    """What a module's loading hooks made of saved weights.

    Attributes:
        values: the values of the submodules that have hooks, by the module's names.
        replaced: names of the saved weights that these values replace.
        renames: new names of parameters by their saved names, where a hook only changed the name.
    """

    values: dict[str, Any] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    renames: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, module: nn.Module, weights: Weights, versions: Mapping[str, int] | None, own: Mapping[str, Any]
    ) -> HookedWeights:
        """Load ``weights`` into copies of the submodules that have loading hooks; ``module`` stays unchanged.

        Only the weights of these submodules are read, each whole. All other weights need no hook and stay in their
        files, so that each rank can read its own part of them.

        Args:
            module: the module, which may be sharded.
            weights: the saved weights.
            versions: the recorded versions of the saved submodules' states; None if unknown.
            own: the module's weights by name, for the shapes of sharded parameters.

        Raises:
            CheckpointError: a hook, or torch on the basis of its result, refuses the weights.
        """
        result = cls()
        for name, part in _hooked_parts(module):
            prefix = f"{name}." if name else ""
            saved = {key[len(prefix) :]: key for key in weights if key.startswith(prefix)}
            given = {key: weights[full] for key, full in saved.items()}
            shell = _shell(part, prefix, own)
            part_versions = None
            if versions is not None:
                part_versions = {
                    path[len(prefix) :]: version
                    for path, version in versions.items()
                    if path.startswith(prefix) or path == name
                }
            pointers = {_pointer(value): key for key, value in given.items()}
            load = _load_function(shell, is_root=not name)
            try:
                missing, unexpected = load(with_versions(shell, given, part_versions))
            except RuntimeError as error:
                raise CheckpointError(
                    f"The weights of {name or type(module).__name__} do not fit: {error}",
                    "the module's loading hooks were called with the saved weights, as load_state_dict calls them.",
                    "build the module as it was trained, or convert the saved weights in the hook.",
                ) from error
            loaded = {key: value for key, value in shell.state_dict().items() if key not in missing}
            result.replaced.update(saved.values())
            result.values.update({prefix + key: value for key, value in loaded.items()})
            result.values.update({prefix + key: given[key] for key in unexpected if key in given})
            for key, value in loaded.items():
                old = pointers.get(_pointer(value))
                if old is not None and old not in loaded:
                    result.renames[prefix + old] = prefix + key
        return result


def load_tensors(
    module: nn.Module,
    state: Mapping[str, Any],
    strict: bool,
    assign: Callable[[torch.Tensor, Any], None],
    kept_elsewhere: Mapping[int, Any] = MappingProxyType({}),
) -> None:
    """Load values by name, each by ``assign``, into a module that does not hold its parameters as whole tensors.

    Args:
        module: the module.
        state: the values by name.
        strict: raise an error for missing and unexpected names.
        assign: called with a parameter or a persistent buffer, and its value in ``state``.
        kept_elsewhere: what has the shape of a whole tensor, by ``id`` of the module's own tensor.

    Raises:
        CheckpointError: names or shapes do not match and ``strict`` is set. No weights were loaded.
    """
    current = module.state_dict(keep_vars=True)
    # A submodule that has loading hooks may change the shapes of its buffers, so that it loads these itself.
    extra = {name: state[name] for name in _resized_buffers(module, current, state)}
    expected = {name: kept_elsewhere.get(id(value), value) for name, value in current.items()}
    WeightMismatch.compare(expected, {**state, **dict.fromkeys(extra)}, partial=not strict).raise_or_warn(
        "The weights", type(module).__name__, strict
    )
    for name, value in current.items():
        if name in state and name not in extra:
            if isinstance(value, torch.Tensor):
                assign(value, state[name])
            else:
                extra[name] = state[name]
    if extra:
        load_current(module, extra)


def _resized_buffers(module: nn.Module, current: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """Return the names of buffers of another shape in ``state`` whose submodule may change the shape as it loads."""
    names = [
        name
        for name, value in current.items()
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and name in state
        if tuple(value.shape) != tuple(state[name].shape)
    ]
    prefixes = [f"{part}." if part else "" for part, _ in _hooked_parts(module)] if names else []
    return [name for name in names if name.startswith(tuple(prefixes))]


def load_current(module: nn.Module, state: Mapping[str, Any], strict: bool = False) -> None:
    """Load values in the module's current form, such as those that `HookedWeights` returns, by ``load_state_dict``."""
    module.load_state_dict(with_versions(module, state, layer_versions(module)), strict=strict)


def _hooked_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and the module of each outermost submodule that has loading hooks."""
    outer: list[str] = []
    for name, part in module.named_modules(remove_duplicate=False):
        if not any(name.startswith(prefix) for prefix in outer) and _has_hooks(part, is_root=not name):
            outer.append(f"{name}." if name else "")
            yield name, part


def _has_hooks(module: nn.Module, is_root: bool) -> bool:
    kind = type(module)
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    return (
        kind._load_from_state_dict is not nn.Module._load_from_state_dict
        or (is_root and not _is_plain(kind.load_state_dict))
        # The hooks of FSDP only restore the sharded parameters.
        or any(not str(inspect.unwrap(_function_of(hook)).__module__).startswith("torch.distributed") for hook in hooks)
    )


def _function_of(hook: Any) -> Any:
    hook = getattr(hook, "hook", hook)  # torch wraps hooks that get the module
    return hook if hasattr(hook, "__module__") else type(hook)


def _is_plain(load_state_dict: Any) -> bool:
    return load_state_dict.__module__ in (nn.Module.__module__, "drivetrain._runtime.plain_names")


def _load_function(shell: nn.Module, is_root: bool) -> Callable[[Mapping[str, Any]], Any]:
    # torch calls load_state_dict only of the root. Assigned values show which parameters were only renamed.
    if not is_root or _is_plain(type(shell).load_state_dict):
        return lambda state: nn.Module.load_state_dict(shell, state, strict=False, assign=True)
    return lambda state: shell.load_state_dict(state, strict=False)


def _plain(name: str) -> str:
    return plain_name(f"{name}.")[:-1]


def _pointer(value: Any) -> Any:
    return (value.data_ptr() or None) if isinstance(value, torch.Tensor) else None


def _shell(module: nn.Module, prefix: str, own: Mapping[str, Any]) -> nn.Module:
    """Return a copy of ``module`` with parameters and buffers of its own, which are whole and on the CPU."""
    copy: nn.Module = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_parameters"] = {
        name: None if value is None else _empty_like(value, own.get(prefix + name, value))
        for name, value in module._parameters.items()
    }
    copy.__dict__["_buffers"] = {
        name: value if value is None or is_lazy(value) else _copy_of(value) for name, value in module._buffers.items()
    }
    copy.__dict__["_modules"] = {
        name: None if child is None else _shell(child, f"{prefix}{name}.", own)
        for name, child in module._modules.items()
    }
    return copy


def _copy_of(buffer: torch.Tensor) -> torch.Tensor:
    if buffer.is_meta:  # built by configure_model, and not initialised before the weights are loaded
        return torch.zeros_like(buffer, device="cpu")
    return buffer.detach().to("cpu", copy=True)


def _empty_like(parameter: Any, whole: Any) -> nn.Parameter:
    if is_lazy(parameter):
        return UninitializedParameter()  # type: ignore[return-value]
    return nn.Parameter(torch.empty(tuple(whole.shape), dtype=parameter.dtype), requires_grad=False)
