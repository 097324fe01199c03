"""Optimizer state keyed by parameter name, one form under every strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from drivetrain.errors import CheckpointError


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Map ``id(parameter)`` to its plain name; of tied names the first in ``named_parameters()`` order."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def named_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}``.

    Raises:
        CheckpointError: the optimizer holds a parameter that is not the module's.
    """
    names = parameter_names(module)
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        unknown = [tuple(parameter.shape) for parameter in group["params"] if id(parameter) not in names]
        if unknown:
            raise CheckpointError(
                f"Parameter group {number} of {type(optimizer).__name__} holds {len(unknown)} parameter(s) that are "
                f"not the module's, of shapes {unknown[:5]}.",
                "optimizer state is kept by parameter name.",
                "register the parameters on the module, or leave them out of the optimizer.",
            )
        groups.append({**group, "params": [names[id(parameter)] for parameter in group["params"]]})
    state = {names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items()}
    return {"state": state, "param_groups": groups}


def load_named_optimizer_state(module: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load state by name into ``optimizer``, whose own grouping and order of parameters stay as they are.

    Raises:
        CheckpointError: a saved name is not in the optimizer, or the number of groups differs.
    """
    names = parameter_names(module)
    own_groups = [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    check_optimizer_fits(optimizer, own_groups, saved)
    index = {name: number for number, name in enumerate(name for group in own_groups for name in group)}
    groups = []
    for group, group_names in zip(saved["param_groups"], own_groups, strict=True):
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({**settings, "params": [index[name] for name in group_names]})
    state = {index[name]: dict(values) for name, values in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def check_optimizer_fits(optimizer: Optimizer, groups: Sequence[Sequence[str]], saved: Mapping[str, Any]) -> None:
    """Refuse saved state that is not for ``optimizer``.

    Args:
        optimizer: that is to be loaded; named in the error.
        groups: the names of its parameters, by group.
        saved: in the form that `named_optimizer_state` gives.

    Raises:
        CheckpointError: a saved name is not in the optimizer, or the number of groups differs.
    """
    missing = sorted(set(saved["state"]) - {name for group in groups for name in group})
    if missing or len(saved["param_groups"]) != len(groups):
        raise CheckpointError(
            f"The saved optimizer state does not fit {type(optimizer).__name__}: "
            f"{len(saved['param_groups'])} saved groups against {len(groups)}, saved but not held: {missing[:10]}.",
            "state is matched by parameter name and groups by their order.",
            "build the optimizer over the same parameters, or load the weights alone.",
        )
