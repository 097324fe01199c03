"""Weights and optimizer state by plain names in float32, each rank giving and taking its part."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.errors import CheckpointError
from drivetrain.strategies import ParameterShard, Region, Span, WeightMismatch, check_optimizer_fits, cut
from drivetrain_strategies.deepspeed._internals import Fragment, Zero


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank keeps its part of a parameter, as exactly as anybody does.

    Attributes:
        local: the part, of shape (n,), or the whole in its own shape.
        shape: of the parameter.
        span: which elements; None for all.
        lent: it will not stay in memory; what is read of it is a copy.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    span: Span | None
    lent: bool = False

    def read(self) -> torch.Tensor | ParameterShard:
        local = self.local.detach().clone() if self.lent else self.local.detach()
        return local if self.span is None else sharded(local, self.shape, self.span)

    @torch.no_grad()
    def write(self, value: Any) -> None:
        self.local.copy_(part_of(value, self.span).view_as(self.local))


def sharded(local: torch.Tensor, shape: tuple[int, ...], span: Span) -> ParameterShard:
    return ParameterShard(local.detach(), shape, span, gather=partial(gather, local.detach(), shape, span))


def gather(local: torch.Tensor, shape: tuple[int, ...], span: Span) -> torch.Tensor:
    """Put the ranks' parts together: where one has its part, the others have zeros."""
    whole = local.new_zeros(shape)
    whole.view(-1)[span.start : span.stop].copy_(local)
    dist.all_reduce(whole)
    return whole


def part_of(value: Any, span: Span | None) -> torch.Tensor:
    """Return a span of a value that is whole, or spread in whatever way. Collective unless it is whole or that span."""
    if isinstance(value, ParameterShard) and span is not None and value.region == span:
        return value.local
    full = getattr(value, "full_tensor", None)
    return cut((value if full is None else full()).detach(), span)


def whole_of(value: Any) -> Any:
    """What `Place.read` or a strategy's state gave, whole and nobody else's. Collective where it is a shard."""
    if isinstance(value, ParameterShard):
        return value.full_tensor()
    return value.clone() if isinstance(value, torch.Tensor) else value


class State:
    """The state of a module under DeepSpeed.

    Args:
        module: with its own names.
        exact: the places of parameters that have no master, by id.
        zero: DeepSpeed's engine; None where nothing is trained.
        publish: gives all ranks the parameters anew after their places were written.
    """

    def __init__(
        self, module: nn.Module, exact: Mapping[int, Place], zero: Zero | None, publish: Callable[[], None]
    ) -> None:
        self._module = module
        self._exact = exact
        self._zero = zero
        self._publish = publish
        self._fragments = {} if zero is None else {id(one.parameter): one for one in zero.fragments()}
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    def places(self, wanted: Container[int] | None = None, write: bool = False) -> Iterator[tuple[int, Place]]:
        """Where parameters are kept, by their ids: one after the other, at hand only until the next is asked for.

        Args:
            wanted: ids; None for all.
            write: what is written there stays.
        """
        for key, place in self._exact.items():
            if wanted is None or key in wanted:
                yield key, place
        for number, fragments in self._flats():
            held = [one for one in fragments if wanted is None or id(one.parameter) in wanted]
            if held:
                with self._begun.at_hand(number, write):
                    for one in held:
                        yield id(one.parameter), Place(one.master, one.shape, one.span, self._begun.lent(number))

    def nbytes_spread(self) -> int:
        """The bytes of all parameters that ranks have parts of."""
        exact = [(one.shape, one.local) for one in self._exact.values() if one.span is not None]
        masters = [(one.shape, one.flat) for one in self._fragments.values()]
        return sum(math.prod(shape) * tensor.element_size() for shape, tensor in (*exact, *masters))

    def _held(self, value: Any) -> Fragment | Place | None:
        """Where a parameter is kept; None for what stays in the module as it is."""
        return self._fragments.get(id(value)) or self._exact.get(id(value))

    @property
    def _begun(self) -> Zero:
        assert self._zero is not None
        return self._zero

    def _flats(self) -> Iterator[tuple[int, list[Fragment]]]:
        """The optimizer's tensors by number, with the parameters that they are of."""
        for number, fragments in groupby(self._fragments.values(), lambda one: one.number):
            yield number, list(fragments)

    # Weights

    def weights(self) -> dict[str, Any]:
        """Parameters and persistent buffers by name; tied names give one object."""
        given: dict[int, Any] = {key: place.read() for key, place in self.places()}
        state: dict[str, Any] = {}
        for name, value in self._module.state_dict(keep_vars=True).items():
            tensor = isinstance(value, torch.Tensor)
            state[name] = given.setdefault(id(value), value.detach()) if tensor else value
        return state

    def regions(self) -> dict[str, Region]:
        found: dict[str, Region] = {}
        for name, value in self._module.state_dict(keep_vars=True).items():
            held = self._held(value)
            if held is not None and held.span is not None:
                found[name] = held.span
        return found

    @torch.no_grad()
    def load_weights(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load parameters and buffers by name. Collective.

        Raises:
            CheckpointError: names or shapes do not fit, and ``strict`` asks for it; nothing is loaded then.
        """
        own = self._module.state_dict(keep_vars=True)
        held = {name: self._held(value) for name, value in own.items()}
        whole = {name: held[name] or value for name, value in own.items()}
        WeightMismatch.compare(whole, state, partial=not strict).raise_or_warn(
            "The weights", type(self._module).__name__, strict
        )
        extra, wanted = {}, {}
        for name, value in own.items():
            if name not in state:
                continue
            if not isinstance(value, torch.Tensor):
                extra[name] = state[name]
            elif held[name] is not None:
                wanted[id(value)] = state[name]
            else:
                value.copy_(part_of(state[name], None))
        for key, place in self.places(wanted, write=True):
            place.write(wanted[key])
        if extra:
            self._module.load_state_dict(extra, strict=False)
        self._publish()

    # The optimizer's state

    def optimizer(self) -> dict[str, Any]:
        """State and groups by parameter names; state that was never begun is not there."""
        optimizer = self._begun.base_optimizer
        state: dict[str, Any] = {}
        for number, fragments in self._flats():
            lent = self._begun.lent(number)
            with self._begun.at_hand(number):
                for one in fragments:
                    if values := optimizer.state.get(one.flat):
                        state[self._names[id(one.parameter)]] = {
                            name: Place(one.of(value), one.shape, one.span, lent).read()
                            if _spread(value, one)
                            else value
                            for name, value in values.items()
                        }
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": names}
            for group, names in zip(optimizer.param_groups, self._groups(), strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def optimizer_regions(self) -> dict[str, Region]:
        # Single numbers are asked for whole: what counts steps has their shape, and no part of it would do.
        return {self._names[key]: one.span for key, one in self._fragments.items() if one.shape}

    @torch.no_grad()
    def load_optimizer(self, saved: Mapping[str, Any]) -> None:
        """Load state by name, the optimizer's own groups staying as they are. Collective.

        A parameter without any counts as one whose state is zero: its group has one count of steps.

        Raises:
            CheckpointError: it is for other parameters or groups, or cannot live in one flat tensor a group.
        """
        zero, optimizer, groups = self._begun, self._begun.base_optimizer, self._groups()
        check_optimizer_fits(optimizer, groups, saved)
        for group, settings in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in settings.items() if key != "params"})
        for number, fragments in self._flats():
            flat, held = fragments[0].flat, {self._names[id(one.parameter)]: one for one in fragments}
            with zero.at_hand(number, write=True):
                # Where DeepSpeed writes tensors to a drive, it knows them by what they are.
                before = optimizer.state.get(flat, {}) if zero.lent(number) else {}
                optimizer.state[flat] = _flattened(flat, held, before, saved["state"])
        zero.relink_state()

    def _groups(self) -> list[list[str]]:
        """The names of each group's parameters, in the module's order."""
        groups: list[list[str]] = [[] for _ in self._begun.base_optimizer.param_groups]
        for key, fragment in self._fragments.items():
            groups[self._begun.group_of_flat(fragment.number)].append(self._names[key])
        return groups


def _spread(value: Any, fragment: Fragment) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == fragment.flat.shape


def _flattened(
    flat: torch.Tensor, held: Mapping[str, Fragment], before: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Return one flat tensor's state, put together from its parameters', in tensors of ``before`` where it has any."""
    state: dict[str, Any] = {}
    told_by: dict[str, str] = {}
    of_elements = _of_elements({name: fragment.shape for name, fragment in held.items()}, saved)
    for name, fragment in held.items():
        for key, value in saved.get(name, {}).items():
            if key in of_elements:
                if key not in state:
                    state[key] = before[key].zero_() if key in before else torch.zeros_like(flat, requires_grad=False)
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
