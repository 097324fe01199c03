"""Weights and optimizer state by plain names in float32, each rank giving and taking its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.errors import CheckpointError
from drivetrain.shards import Region, Shard, Span, cut
from drivetrain_strategies.deepspeed_private import Fragment, Zero


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank keeps its part of a parameter, as exactly as anybody does.

    Attributes:
        local: the part, of shape (n,), or the whole in its own shape.
        shape: of the parameter.
        span: which elements; None for all.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    span: Span | None

    def read(self) -> torch.Tensor | Shard:
        return self.local.detach() if self.span is None else sharded(self.local, self.shape, self.span)

    @torch.no_grad()
    def write(self, value: Any) -> None:
        self.local.copy_(part_of(value, self.span).view_as(self.local))


def sharded(local: torch.Tensor, shape: tuple[int, ...], span: Span) -> Shard:
    return Shard(local.detach(), shape, span, gather=partial(_gather, local.detach(), shape, span))


def _gather(local: torch.Tensor, shape: tuple[int, ...], span: Span) -> torch.Tensor:
    """Put the ranks' parts together: where one has its part, the others have zeros."""
    whole = local.new_zeros(shape)
    whole.view(-1)[span.start : span.stop].copy_(local)
    dist.all_reduce(whole)
    return whole


def part_of(value: Any, span: Span | None) -> torch.Tensor:
    """Return a span of a value that is whole, or spread in whatever way. Collective unless it is whole or that span."""
    if isinstance(value, Shard) and span is not None and value.region == span:
        return value.local
    full = getattr(value, "full_tensor", None)
    return cut((value if full is None else full()).detach(), span)


class State:
    """The state of a module under DeepSpeed.

    Args:
        module: with its own names.
        places: of its parameters, by id.
        zero: DeepSpeed's engine; None where nothing is trained.
        publish: gives all ranks the parameters anew after their places were written.
    """

    def __init__(
        self, module: nn.Module, places: Mapping[int, Place], zero: Zero | None, publish: Callable[[], None]
    ) -> None:
        self._module = module
        self.places = places
        self._zero = zero
        self._publish = publish
        self._fragments = {} if zero is None else {id(one.parameter): one for one in zero.fragments()}
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    # Weights

    def weights(self) -> dict[str, Any]:
        """Parameters and persistent buffers by name; tied names give one object."""
        given: dict[int, Any] = {}
        state: dict[str, Any] = {}
        for name, value in self._module.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                state[name] = value
                continue
            if id(value) not in given:
                place = self.places.get(id(value))
                given[id(value)] = value.detach() if place is None else place.read()
            state[name] = given[id(value)]
        return state

    def regions(self) -> dict[str, Region]:
        found: dict[str, Region] = {}
        for name, value in self._module.state_dict(keep_vars=True).items():
            place = self.places.get(id(value))
            if place is not None and place.span is not None:
                found[name] = place.span
        return found

    @torch.no_grad()
    def load_weights(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load parameters and buffers by name. Collective.

        Raises:
            CheckpointError: names or shapes do not fit, and ``strict`` asks for it; nothing is loaded then.
        """
        own = self._module.state_dict(keep_vars=True)
        shapes = {name: self._shape(value) for name, value in own.items() if isinstance(value, torch.Tensor)}
        missing = [name for name in own if name not in state]
        unexpected = [name for name in state if name not in own]
        wrong = [
            f"{name} ({tuple(state[name].shape)} instead of {shape})"
            for name, shape in shapes.items()
            if name in state and tuple(state[name].shape) != shape
        ]
        if wrong or (strict and (missing or unexpected)):
            raise CheckpointError(
                f"The weights do not fit {type(self._module).__name__}: missing {missing[:10]}, unexpected "
                f"{unexpected[:10]}, wrongly shaped {wrong[:10]}.",
                "weights are matched by name.",
                "build the module as it was trained, or load with strict=False.",
            )
        extra = {}
        for name, value in own.items():
            if name not in state:
                continue
            if not isinstance(value, torch.Tensor):
                extra[name] = state[name]
            elif (place := self.places.get(id(value))) is not None:
                place.write(state[name])
            else:
                value.copy_(part_of(state[name], None))
        if extra:
            self._module.load_state_dict(extra, strict=False)
        self._publish()

    def _shape(self, value: torch.Tensor) -> tuple[int, ...]:
        place = self.places.get(id(value))
        return tuple(value.shape) if place is None else place.shape

    # The optimizer's state

    def optimizer(self) -> dict[str, Any]:
        """State and groups by parameter names; state that was never begun is not there."""
        zero = self._zero
        assert zero is not None
        optimizer = zero.base_optimizer
        state: dict[str, Any] = {}
        for key, fragment in self._fragments.items():
            values = optimizer.state.get(fragment.flat)
            if values:
                shape = self.places[key].shape
                state[self._names[key]] = {
                    name: sharded(fragment.of(value), shape, fragment.span) if _spread(value, fragment) else value
                    for name, value in values.items()
                }
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": names}
            for group, names in zip(optimizer.param_groups, self._groups(), strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def optimizer_regions(self) -> dict[str, Region]:
        # Single numbers are asked for whole: what counts steps has their shape, and no part of it would do.
        return {self._names[key]: one.span for key, one in self._fragments.items() if self.places[key].shape}

    @torch.no_grad()
    def load_optimizer(self, saved: Mapping[str, Any]) -> None:
        """Load state by name, the optimizer's own groups staying as they are. Collective.

        A parameter without any counts as one whose state is zero: its group has one count of steps.

        Raises:
            CheckpointError: it is for other parameters or groups, or cannot live in one flat tensor a group.
        """
        zero = self._zero
        assert zero is not None
        optimizer, groups = zero.base_optimizer, self._groups()
        missing = sorted(set(saved["state"]) - {name for group in groups for name in group})
        if missing or len(saved["param_groups"]) != len(groups):
            raise CheckpointError(
                f"The saved optimizer state does not fit {type(optimizer).__name__}: "
                f"{len(saved['param_groups'])} saved groups against {len(groups)}, saved but not held: {missing[:10]}.",
                "state is matched by parameter name and groups by their order.",
                "build the optimizer over the same parameters, or load the weights alone.",
            )
        for group, settings in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in settings.items() if key != "params"})
        shapes = {self._names[key]: self.places[key].shape for key in self._fragments}
        for flat in zero.flats():
            held = {self._names[key]: one for key, one in self._fragments.items() if one.flat is flat}
            optimizer.state[flat] = _flattened(flat, held, shapes, saved["state"])
        zero.relink_state()

    def _groups(self) -> list[list[str]]:
        """The names of each group's parameters, in the module's order."""
        zero = self._zero
        assert zero is not None
        number_of = {id(flat): zero.group_of_flat(number) for number, flat in enumerate(zero.flats())}
        groups: list[list[str]] = [[] for _ in zero.base_optimizer.param_groups]
        for key, fragment in self._fragments.items():
            groups[number_of[id(fragment.flat)]].append(self._names[key])
        return groups


def _spread(value: Any, fragment: Fragment) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == fragment.flat.shape


def _flattened(
    flat: torch.Tensor, held: Mapping[str, Fragment], shapes: Mapping[str, tuple[int, ...]], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Return one flat tensor's state, put together from its parameters'."""
    state: dict[str, Any] = {}
    told_by: dict[str, str] = {}
    of_elements = _of_elements({name: shapes[name] for name in held}, saved)
    for name, fragment in held.items():
        for key, value in saved.get(name, {}).items():
            if key in of_elements:
                if key not in state:
                    state[key] = torch.zeros_like(flat, requires_grad=False)
                fragment.of(state[key]).copy_(part_of(value, fragment.span).reshape(-1))
            elif key not in state:
                state[key], told_by[key] = value.clone() if isinstance(value, torch.Tensor) else value, name
            elif not _alike(state[key], value):
                raise CheckpointError(
                    f"The optimizer's {key!r} is {state[key]} for {told_by.get(key)!r} and {value} for {name!r}.",
                    "under ZeRO the parameters of a group are one flat tensor, with one of it.",
                    "give them groups of their own, or load the weights alone.",
                )
    return state


def _of_elements(shapes: Mapping[str, tuple[int, ...]], saved: Mapping[str, Any]) -> set[str]:
    """The keys under which state has a value for each element, and not one for a parameter.

    Those of a single number do not tell by their shape: its neighbours do, and among none but single numbers the name.
    """
    found: set[str] = set()
    for name, shape in shapes.items():
        for key, value in saved.get(name, {}).items():
            if shape and tuple(getattr(value, "shape", ())) == shape:
                found.add(key)
    if not any(shapes.values()):
        found = {key for name in shapes for key in saved.get(name, {}) if key != "step"}
    return found


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    return bool(one == other)
