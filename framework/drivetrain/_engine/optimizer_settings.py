"""Describes the groups and schedulers that ``configure_optimizers`` gives, and compares them with a saved run's."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.errors import listed

IMPLEMENTATION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
"""Options that select an implementation of the same update. A resumed run uses its own values."""

_MEMBERS = ("params", "param_names", "name")
"""Entries of a group that are no options: its parameters, their names, and a label that some users give groups."""

_NO_OPTIONS = (*_MEMBERS, *IMPLEMENTATION_OPTIONS)

_RATES = ("base_lrs", "_last_lr")
"""Attributes of a scheduler that repeat the learning rates of its optimizer's groups."""

Group = Mapping[str, Any]
"""The names of a group's parameters as ``params``, and the group's options that are numbers, strings or lists."""


class SettingsDifference(NamedTuple):
    """A difference between an optimizer's groups in the saved run and in this one.

    Attributes:
        saved: a description of what the saved run had.
        now: a description of what this run has.
        is_number: whether only a number differs, such as a learning rate.
    """

    saved: str
    now: str
    is_number: bool


def describe_groups(optimizers: Sequence[Optimizer], named: Mapping[str, nn.Parameter]) -> list[list[dict[str, Any]]]:
    """Return a description of each group of each optimizer, which a JSON document can hold.

    Options of other types than numbers, booleans, strings, None and lists of them are left out. A tensor with one
    element is described by its number, which waits for the tensor's device.

    Args:
        optimizers: the optimizers that ``configure_optimizers`` returned.
        named: the module's parameters by name.
    """
    names = {id(parameter): name for name, parameter in named.items()}
    return [
        [
            {
                "params": [names.get(id(parameter), "?") for parameter in group["params"]],
                **_plain_entries(group, _NO_OPTIONS),
            }
            for group in optimizer.param_groups
        ]
        for optimizer in optimizers
    ]


def describe_schedulers(schedulers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the attributes of each scheduler that are numbers, strings or lists, except the optimizer's rates.

    The positions of new schedulers are among them, and are alike in all runs.
    """
    return [_plain_entries(getattr(scheduler, "__dict__", {}), _RATES) for scheduler in schedulers]


def _is_plain(value: Any) -> bool:
    """Return whether a value is of a type that a description contains."""
    parts = value if isinstance(value, list) else [value]
    return all(part is None or isinstance(part, bool | int | float | str) for part in parts)


def compare_schedulers(saved: Mapping[str, Any], now: Mapping[str, Any], scheduler: str) -> list[SettingsDifference]:
    """Return the differences between the settings of a scheduler in the saved run and in this one."""
    return [
        SettingsDifference(f"{name}={saved[name]!r} of {scheduler}", f"{name}={now[name]!r}", True)
        for name in saved
        if name in now and not _same(saved[name], now[name])
    ]


def _plain_entries(values: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    """Return the entries that a description contains, without ``left_out``."""
    plain = {name: _plain(value) for name, value in values.items() if name not in left_out}
    return {name: value for name, value in plain.items() if _is_plain(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        return value.item()
    if isinstance(value, float):
        return float(value)  # NumPy's floats are floats too, and are shown as such
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def compare_groups(
    saved: Sequence[Group], now: Sequence[Group], frozen: Collection[str], optimizer: str
) -> list[SettingsDifference]:
    """Return the differences between the groups of an optimizer in the saved run and in this one.

    Args:
        saved: the description of the groups in the saved run.
        now: the description of the groups in this run.
        frozen: the parameters that were frozen when ``configure_optimizers`` was called in either run. A function that
            passes only trainable parameters to the optimizer gives such a parameter in one run and not in the other,
            so they are not compared.
        optimizer: the optimizer, for the description.
    """
    saved_groups, groups = _without(saved, frozen), _without(now, frozen)
    moved = list(_moved(saved_groups, groups, optimizer))
    if moved or len(saved_groups) != len(groups):
        return moved or [
            SettingsDifference(f"{len(saved_groups)} parameter groups in {optimizer}", str(len(groups)), False)
        ]
    return [
        SettingsDifference(
            f"{name}={group[name]!r} in group {number} of {optimizer}",
            f"{name}={other[name]!r}",
            _differs_in_number(group[name], other[name]),
        )
        for (number, group), (_, other) in zip(saved_groups, groups, strict=True)
        for name in group
        # An option that only one of the runs has was added by a version of torch, or by a scheduler of another class.
        if name in other and name not in _MEMBERS and not _same(group[name], other[name])
    ]


def _without(groups: Sequence[Group], names: Collection[str]) -> list[tuple[int, dict[str, Any]]]:
    """Return the groups with their numbers, without the parameters ``names`` and without groups of only these."""
    remaining = [
        (number, {**group, "params": [name for name in group["params"] if name not in names]})
        for number, group in enumerate(groups)
    ]
    return [(number, group) for number, group in remaining if group["params"] or not groups[number]["params"]]


def _moved(
    saved: Sequence[tuple[int, Group]], now: Sequence[tuple[int, Group]], optimizer: str
) -> Iterator[SettingsDifference]:
    """Yield a difference for the parameters that are in another group, or only in one of the runs."""
    places = [
        {name: (index, number) for index, (number, group) in enumerate(groups) for name in group["params"]}
        for groups in (saved, now)
    ]
    moves: dict[tuple[str, str], list[str]] = {}
    for name in {**places[0], **places[1]}:
        before, after = places[0].get(name), places[1].get(name)
        if (before and before[0]) != (after and after[0]):
            moves.setdefault((_group_name(before), _group_name(after)), []).append(name)
    for (before_name, after_name), names in moves.items():
        yield SettingsDifference(f"{listed(names)} in {before_name} of {optimizer}", f"in {after_name}", False)


def _group_name(place: tuple[int, int] | None) -> str:
    return "no group" if place is None else f"group {place[1]}"


def _same(saved: Any, now: Any) -> bool:
    """Return whether two values are equal, up to the precision of a learning rate in a float32 tensor."""
    if isinstance(saved, list) and isinstance(now, list):
        return len(saved) == len(now) and all(map(_same, saved, now))
    if isinstance(saved, float) and isinstance(now, float):
        return math.isclose(saved, now, rel_tol=1e-6) or (math.isnan(saved) and math.isnan(now))
    return bool(saved == now)


def _differs_in_number(saved: Any, now: Any) -> bool:
    """Return whether two different values differ only in numbers. A boolean is not a number."""
    if isinstance(saved, list) and isinstance(now, list):
        return len(saved) == len(now) and all(
            part == other or _differs_in_number(part, other) for part, other in zip(saved, now, strict=True)
        )
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in (saved, now))


def add_later_groups(
    optimizer: Optimizer, configured: Sequence[Group], saved: Sequence[Mapping[str, Any]], named: Mapping[str, Any]
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
    has_names = "param_names" in optimizer.param_groups[0]
    for group in saved:
        names = [name for name in group["params"] if name in named and name not in known]
        added = [(name, named[name]) for name in names if id(named[name]) not in present]
        if added:
            settings = {name: value for name, value in group.items() if name in _inherited(optimizer)}
            params = added if has_names else [parameter for _, parameter in added]
            optimizer.add_param_group({**settings, "params": params})


def _inherited(optimizer: Optimizer) -> set[str]:
    return {*optimizer.defaults} - {*IMPLEMENTATION_OPTIONS}


def keep_implementation(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Replace the saved options that select an implementation by those of ``optimizer``.

    The saved ones may not exist on this run's device or for its tensors.

    Args:
        optimizer: the optimizer that will load ``state``.
        state: the saved state, whose groups are changed.
    """
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=False):
        saved.update({name: group[name] for name in IMPLEMENTATION_OPTIONS if name in group and name in saved})
