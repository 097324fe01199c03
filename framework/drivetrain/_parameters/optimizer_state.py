"""Optimizer state by parameter name, in the same form under every strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.errors import CheckpointError

IMPLEMENTATION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
"""Options that select an implementation of the same update. A resumed run uses its own values."""


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Return each parameter's plain name by ``id(parameter)``. A tied parameter gets the first of its names."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def named_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}``.

    Raises:
        CheckpointError: the optimizer holds a parameter that is not in the module, or has state for an object that is
            not a parameter of the module.
    """
    names = parameter_names(module)
    held = [*(parameter for group in optimizer.param_groups for parameter in group["params"]), *optimizer.state]
    unknown = [
        f"a tensor of shape {tuple(one.shape)}" if isinstance(one, Tensor) else repr(one)
        for one in held
        if id(one) not in names
    ]
    if unknown:
        raise CheckpointError(
            f"{type(optimizer).__name__} holds {', '.join(unknown[:5])}, which is not a parameter of the module.",
            "optimizer state is saved by parameter name.",
            "register the parameters on the module, or leave them out of the optimizer; store other state in the "
            "optimizer's param_groups (numbers, strings, lists) or in the state of a parameter.",
        )
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    state = {names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items()}
    return {"state": state, "param_groups": groups}


def load_named_optimizer_state(module: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load state by name into ``optimizer``, whose groups and order of parameters stay unchanged.

    Args:
        module: the module whose parameters the optimizer holds.
        optimizer: the optimizer.
        saved: state in the form that `named_optimizer_state` returns. The key "weight_dtypes" may hold the dtypes of
            the saved weights by parameter name. State of the same dtype follows its parameter to another precision, and
            state of another dtype keeps it.

    Raises:
        CheckpointError: a saved name is not in the optimizer, the number of groups differs, or ``load_state_dict`` of
            the optimizer does not load its ``param_groups``.
    """
    names = parameter_names(module)
    own_groups = [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    check_optimizer_fits(optimizer, own_groups, saved)
    positions = {name: number for number, name in enumerate(name for group in own_groups for name in group)}
    groups, start = [], 0
    for group, group_names in zip(saved["param_groups"], own_groups, strict=True):
        settings = {key: value for key, value in group.items() if key != "params"}
        # For each value, torch searches "params" for the parameter. A search takes constant time in a range, but linear
        # time in a list.
        groups.append({**settings, "params": range(start, start + len(group_names))})
        start += len(group_names)
    state = {positions[name]: dict(values) for name, values in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    _check_groups_are_loaded(optimizer, groups)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    weight_dtypes: Mapping[str, torch.dtype] = saved.get("weight_dtypes", {})
    for name, values in saved["state"].items():
        loaded = optimizer.state[parameters[positions[name]]]
        for key, value in values.items():
            if key in loaded and key != "step":  # torch keeps the dtype of "step"
                loaded[key] = _uncast(loaded[key], value, weight_dtypes.get(name))


def _check_groups_are_loaded(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a wrapper that loads the optimizer within it, and keeps the ``param_groups`` from before itself."""
    for group, saved_group in zip(optimizer.param_groups, saved, strict=True):
        if "lr" in saved_group and "lr" in group and float(group["lr"]) != float(saved_group["lr"]):
            kind = type(optimizer).__name__
            raise CheckpointError(
                f"{kind}.load_state_dict leaves the learning rate at {float(group['lr']):.6g}, and "
                f"{float(saved_group['lr']):.6g} was saved.",
                f"schedulers would change {kind}.param_groups, and the optimizer within it would use others.",
                "let param_groups be a property that returns the param_groups of the optimizer within it.",
            )


def _uncast(loaded: Any, saved: Any, weight_dtype: torch.dtype | None) -> Any:
    """Return the loaded value without the conversions that do not suit it.

    ``Optimizer.load_state_dict`` converts every tensor to the parameter's dtype if that is a floating-point type, which
    rounds state that has a higher precision than the weights and changes counts, masks and complex numbers. It replaces
    a string by the text of a generator.
    """
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        follows = saved.is_floating_point() if weight_dtype is None else saved.dtype == weight_dtype
        return loaded if follows or loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, str) and isinstance(loaded, str):
        return saved
    if isinstance(saved, dict) and isinstance(loaded, dict) and saved.keys() == loaded.keys():
        return type(saved)({key: _uncast(loaded[key], value, weight_dtype) for key, value in saved.items()})
    if isinstance(saved, list | tuple) and type(loaded) is type(saved) and len(loaded) == len(saved):
        pairs = zip(loaded, saved, strict=True)
        return type(saved)(_uncast(part, saved_part, weight_dtype) for part, saved_part in pairs)
    return loaded


def regroup_parameters(
    optimizer: Optimizer, groups: Sequence[Sequence[str]], named: Mapping[str, nn.Parameter]
) -> None:
    """Give ``optimizer`` the saved parameter groups, with no other parameters than they had.

    Nothing changes if the optimizer already has the saved groups. Nothing changes either if a saved name is not in the
    module, because loading the state then raises an error. A new group has the optimizer's defaults until state is
    loaded. Frozen parameters stay in their group, since some strategies do not save frozen parameters.

    Args:
        optimizer: the optimizer, before its state is loaded.
        groups: parameter names of each saved group.
        named: the module's parameters by name.
    """
    names = {id(parameter): name for name, parameter in named.items()}
    current_groups = [
        [names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups
    ]
    saved_names = {name for group in groups for name in group}
    if not saved_names <= set(named) or any(name not in named for group in current_groups for name in group):
        return
    unsaved_groups = [[name for name in group if name not in saved_names] for group in current_groups]
    frozen = [[name for name in group if not named[name].requires_grad] for group in unsaved_groups]
    frozen += [[]] * (len(groups) - len(frozen))
    new_groups = [[*group, *frozen_names] for group, frozen_names in zip(groups, frozen, strict=False)]
    if [set(group) for group in current_groups] == [set(group) for group in new_groups]:
        return
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    settings += [dict(optimizer.defaults)] * (len(groups) - len(settings))
    optimizer.param_groups[:] = [
        {**setting, "params": [named[name] for name in group]}
        for setting, group in zip(settings, new_groups, strict=False)
    ]
    kept_names = {name for group in new_groups for name in group}
    for name in (name for group in current_groups for name in group if name not in kept_names):
        optimizer.state.pop(named[name], None)


def check_optimizer_fits(optimizer: Optimizer, groups: Sequence[Sequence[str]], saved: Mapping[str, Any]) -> None:
    """Refuse saved state that does not fit ``optimizer``.

    Args:
        optimizer: the optimizer to load, whose class the error names.
        groups: parameter names of each of the optimizer's groups.
        saved: state in the form that `named_optimizer_state` returns.

    Raises:
        CheckpointError: a saved name is not in the optimizer, or the number of groups differs.
    """
    missing = sorted(set(saved["state"]) - {name for group in groups for name in group})
    if missing or len(saved["param_groups"]) != len(groups):
        unknown = f" The saved names {missing[:10]} are not in the optimizer." if missing else ""
        raise CheckpointError(
            f"The saved optimizer state does not fit {type(optimizer).__name__}: "
            f"{len(saved['param_groups'])} groups were saved, and the optimizer has {len(groups)}.{unknown}",
            "state is matched by parameter name, and groups are matched by their order.",
            "build the optimizer over the same parameters, or load the weights alone.",
        )


def add_later_groups(
    optimizer: Optimizer,
    configured: Sequence[Mapping[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    named: Mapping[str, Any],
) -> None:
    """Give an optimizer that starts anew the groups that were added to it during the saved run.

    The code that added them does not add them again, so that their parameters would no longer train. The groups have
    their saved settings, but no state.

    Args:
        optimizer: the optimizer, with the groups that ``configure_optimizers`` gave.
        configured: the groups that ``configure_optimizers`` gave in the saved run.
        saved: the groups at the save.
        named: the module's parameters by name.
    """
    present = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    known = {name for group in configured for name in group["params"]}
    inherited = optimizer.defaults.keys() - {*IMPLEMENTATION_OPTIONS}
    has_names = "param_names" in optimizer.param_groups[0]
    for group in saved:
        names = [name for name in group["params"] if name in named and name not in known]
        added = [(name, named[name]) for name in names if id(named[name]) not in present]
        if added:
            settings = {name: value for name, value in group.items() if name in inherited}
            params = added if has_names else [parameter for _, parameter in added]
            optimizer.add_param_group({**settings, "params": params})


def keep_implementation(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Replace the saved options that select an implementation by those of ``optimizer``.

    The saved ones may not exist on this run's device or for its tensors.

    Args:
        optimizer: the optimizer that will load ``state``.
        state: the saved state, whose groups are changed.
    """
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=False):
        saved.update({name: group[name] for name in IMPLEMENTATION_OPTIONS if name in group and name in saved})
