"""Reads and writes float32 weights and optimizer state by the names of the user's parameters.

Each rank handles only its part of a tensor.
"""

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
from torch.optim import Optimizer

from drivetrain.errors import CheckpointError
from drivetrain.strategies import (
    ParameterShard,
    Region,
    Span,
    check_optimizer_fits,
    cut,
    divide_weights,
    load_current,
)
from drivetrain_strategies.deepspeed._internals import Fragment, Zero, write_part


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """This rank's most exact copy of a parameter, or of this rank's part of a parameter.

    Attributes:
        local: this rank's part, of shape (n,), or the whole parameter in the parameter's shape.
        shape: shape of the whole parameter.
        span: the elements that ``local`` holds; None if ``local`` holds all elements.
        is_swapped: whether ``local`` will be swapped out to a drive, so that `read` must copy.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    span: Span | None
    is_swapped: bool = False

    def read(self) -> torch.Tensor | ParameterShard:
        local = self.local.detach().clone() if self.is_swapped else self.local.detach()
        return local if self.span is None else sharded(local, self.shape, self.span)

    @torch.no_grad()
    def write(self, value: Any) -> None:
        self.local.copy_(part_of(value, self.span).view_as(self.local))


def sharded(local: torch.Tensor, shape: tuple[int, ...], span: Span) -> ParameterShard:
    return ParameterShard(local.detach(), shape, span, gather=partial(gather, local.detach(), shape, span))


def gather(local: torch.Tensor, shape: tuple[int, ...], span: Span) -> torch.Tensor:
    """Gather all ranks' parts, as a sum of tensors that are zero outside the rank's part. Collective."""
    full_value = local.new_zeros(shape)
    full_value.view(-1)[span.start : span.stop].copy_(local)
    dist.all_reduce(full_value)
    return full_value


def part_of(value: Any, span: Span | None) -> torch.Tensor:
    """Return the elements ``span`` of a whole or sharded value. Collective if a shard holds other elements."""
    if isinstance(value, ParameterShard) and span is not None and value.region == span:
        return value.local
    full_tensor = getattr(value, "full_tensor", None)
    return cut((value if full_tensor is None else full_tensor()).detach(), span)


def whole_of(value: Any) -> Any:
    """Return a whole copy of a value from `StoredParameter.read` or a state. Collective if the value is a shard."""
    if isinstance(value, ParameterShard):
        return value.full_tensor()
    return value.clone() if isinstance(value, torch.Tensor) else value


class State:
    """The state of a module under DeepSpeed.

    Args:
        module: the user's module.
        unrounded: stored parameters that have no master weights, by ``id`` of the parameter.
        zero: DeepSpeed's engine; None if nothing is trained.
        update_compute_weights: called after a load, to update the weights that the module computes with.
    """

    def __init__(
        self,
        module: nn.Module,
        unrounded: Mapping[int, StoredParameter],
        zero: Zero | None,
        update_compute_weights: Callable[[], None],
    ) -> None:
        self._module = module
        self._unrounded = unrounded
        self._zero = zero
        self._update_compute_weights = update_compute_weights
        self._fragments = {} if zero is None else {id(fragment.parameter): fragment for fragment in zero.fragments()}
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    def stored_parameters(
        self, wanted: Container[int] | None = None, write: bool = False
    ) -> Iterator[tuple[int, StoredParameter]]:
        """Yield each parameter's id and `StoredParameter`. An item is valid only until the next item is requested.

        Args:
            wanted: ids of the parameters to yield; None yields all parameters.
            write: whether changes are written back to a drive.
        """
        for key, stored in self._unrounded.items():
            if wanted is None or key in wanted:
                yield key, stored
        for number, fragments in self._fragments_by_flat_tensor():
            selected = [fragment for fragment in fragments if wanted is None or id(fragment.parameter) in wanted]
            if selected:
                with self._active_zero.swapped_in(number, write):
                    is_swapped = self._active_zero.is_swapped(number)
                    for fragment in selected:
                        stored = StoredParameter(fragment.master, fragment.shape, fragment.span, is_swapped)
                        yield id(fragment.parameter), stored

    def sharded_nbytes(self) -> int:
        """Return the number of bytes of all sharded parameters."""
        unrounded = [(stored.shape, stored.local) for stored in self._unrounded.values() if stored.span is not None]
        masters = [(fragment.shape, fragment.flat) for fragment in self._fragments.values()]
        return sum(math.prod(shape) * tensor.element_size() for shape, tensor in (*unrounded, *masters))

    def _find(self, value: Any) -> Fragment | StoredParameter | None:
        """Return the object that stores a parameter, or None for a tensor that stays in the module."""
        return self._fragments.get(id(value)) or self._unrounded.get(id(value))

    @property
    def _active_zero(self) -> Zero:
        assert self._zero is not None
        return self._zero

    def _fragments_by_flat_tensor(self) -> Iterator[tuple[int, list[Fragment]]]:
        """Yield the index and the fragments of each flat tensor."""
        for number, fragments in groupby(self._fragments.values(), lambda fragment: fragment.flat_index):
            yield number, list(fragments)

    # Weights

    def weights(self) -> dict[str, Any]:
        """Return parameters and persistent buffers by name. The names of a tied parameter share one object."""
        values: dict[int, Any] = {key: stored.read() for key, stored in self.stored_parameters()}
        state: dict[str, Any] = {}
        for name, value in self._module.state_dict(keep_vars=True).items():
            is_tensor = isinstance(value, torch.Tensor)
            state[name] = values.setdefault(id(value), value.detach()) if is_tensor else value
        return state

    def regions(self) -> dict[str, Region]:
        regions: dict[str, Region] = {}
        for name, value in self._module.state_dict(keep_vars=True).items():
            stored = self._find(value)
            if stored is not None and stored.span is not None:
                regions[name] = stored.span
        return regions

    @torch.no_grad()
    def load_weights(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load parameters and buffers by name. Collective.

        Raises:
            CheckpointError: names or shapes do not match and ``strict`` is set. No weights were loaded.
        """
        current = self._module.state_dict(keep_vars=True)
        stored_by_name = {name: self._find(value) for name, value in current.items()}
        expected = {name: stored_by_name[name] or value for name, value in current.items()}
        weights, loaded_by_module = divide_weights(self._module, state, strict, expected)
        wanted = {}
        for name, value in weights.items():
            if stored_by_name[name] is not None:
                wanted[id(current[name])] = value
            else:
                current[name].copy_(part_of(value, None))
        for key, stored in self.stored_parameters(wanted, write=True):
            stored.write(wanted[key])
        if loaded_by_module:
            load_current(self._module, loaded_by_module)
        self._update_compute_weights()

    @torch.no_grad()
    def adopt_compute_weights(self) -> None:
        """Write values that user code gave to the module's parameters into the master weights. Does not communicate."""
        self._active_zero.keep_assigned_weights()
        for number, fragments in self._fragments_by_flat_tensor():
            held = [fragment for fragment in fragments if self._active_zero.holds_values(fragment)]
            if held:
                with self._active_zero.swapped_in(number, write=True):
                    for fragment in held:
                        master, part = fragment.master, cut(fragment.parameter.detach(), fragment.span)
                        part = part.to(master.device)
                        # A master weight is more exact than the value that was rounded from it.
                        master.copy_(torch.where(part == master.to(part.dtype), master, part.to(master.dtype)))
                        if self._active_zero.stage == 3:
                            write_part(fragment.parameter, part, fragment.span)

    # State of the optimizer

    def optimizer(self) -> dict[str, Any]:
        """Return state and parameter groups by parameter names. Parameters without state yet are left out."""
        optimizer = self._active_zero.base_optimizer
        state: dict[str, Any] = {}
        for number, fragments in self._fragments_by_flat_tensor():
            is_swapped = self._active_zero.is_swapped(number)
            with self._active_zero.swapped_in(number):
                for fragment in fragments:
                    if values := optimizer.state.get(fragment.flat):
                        self._check_sliceable(values, optimizer)
                        shape, span = fragment.shape, fragment.span
                        state[self._names[id(fragment.parameter)]] = {
                            name: StoredParameter(fragment.slice_of(value), shape, span, is_swapped).read()
                            if _is_flat(value, fragment)
                            else value
                            for name, value in values.items()
                        }
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": names}
            for group, names in zip(optimizer.param_groups, self._groups(), strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def _check_sliceable(self, values: Mapping[str, Any], optimizer: Optimizer) -> None:
        for key, value in values.items():
            if hasattr(value, "__tensor_flatten__"):
                raise CheckpointError(
                    f"The state {key!r} of {type(optimizer).__name__} is of class {type(value).__name__}, which wraps "
                    "other tensors.",
                    "ZeRO keeps the parameters of a group in one flat tensor, and state that is stored in blocks "
                    "cannot be cut into the parts of the parameters.",
                    "use strategy='fsdp' or 'ddp' with this optimizer, or save only weights: "
                    "Checkpoint(save_weights_only=True).",
                )

    def optimizer_regions(self) -> dict[str, Region]:
        # Scalar parameters are left out. Their state has the shape of a step counter, which must not be sharded.
        return {self._names[key]: fragment.span for key, fragment in self._fragments.items() if fragment.shape}

    @torch.no_grad()
    def load_optimizer(self, saved: Mapping[str, Any]) -> None:
        """Load state by parameter names into the optimizer's current groups. Collective.

        A parameter without saved state gets zeros, since all parameters of a group share one step counter.

        Raises:
            CheckpointError: the state has other parameters or groups, or differs between parameters of one flat tensor.
        """
        zero, optimizer, groups = self._active_zero, self._active_zero.base_optimizer, self._groups()
        check_optimizer_fits(optimizer, groups, saved)
        for group, settings in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in settings.items() if key != "params"})
        for number, fragments in self._fragments_by_flat_tensor():
            flat, by_name = fragments[0].flat, {self._names[id(fragment.parameter)]: fragment for fragment in fragments}
            with zero.swapped_in(number, write=True):
                # DeepSpeed identifies tensors on a drive by object, so the existing objects must be reused.
                reusable = optimizer.state.get(flat, {}) if zero.is_swapped(number) else {}
                optimizer.state[flat] = _flattened(flat, by_name, reusable, saved["state"])
        zero.relink_state()

    def _groups(self) -> list[list[str]]:
        """Return the parameter names of each group, in module order."""
        groups: list[list[str]] = [[] for _ in self._active_zero.base_optimizer.param_groups]
        for key, fragment in self._fragments.items():
            groups[self._active_zero.group_of_flat_tensor(fragment.flat_index)].append(self._names[key])
        return groups


def _is_flat(value: Any, fragment: Fragment) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == fragment.flat.shape


def _flattened(
    flat: torch.Tensor, fragments: Mapping[str, Fragment], reusable: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Build one flat tensor's state from its parameters' states, reusing the tensors in ``reusable``."""
    state: dict[str, Any] = {}
    set_by: dict[str, str] = {}
    elementwise = _elementwise_keys({name: fragment.shape for name, fragment in fragments.items()}, saved)
    for name, fragment in fragments.items():
        for key, value in saved.get(name, {}).items():
            if key in elementwise:
                if key not in state:
                    state[key] = (
                        reusable[key].zero_() if key in reusable else torch.zeros_like(flat, requires_grad=False)
                    )
                fragment.slice_of(state[key]).copy_(part_of(value, fragment.span).reshape(-1))
            elif key not in state:
                state[key], set_by[key] = value.clone() if isinstance(value, torch.Tensor) else value, name
            elif not _equal(state[key], value):
                raise CheckpointError(
                    f"The optimizer's {key!r} is {state[key]} for {set_by.get(key)!r} and {value} for {name!r}.",
                    f"ZeRO keeps the parameters of a group in one flat tensor, which has only one {key!r}.",
                    "put these parameters into different groups, or load only the weights.",
                )
    return state


def _elementwise_keys(shapes: Mapping[str, tuple[int, ...]], saved: Mapping[str, Any]) -> set[str]:
    """Return the keys whose values have one entry per element instead of one per parameter.

    A key is elementwise if a value has the shape of its parameter. For scalar parameters, the other parameters of the
    flat tensor decide. If all of these are scalars, too, every key except ``step`` is elementwise.
    """
    keys: set[str] = set()
    for name, shape in shapes.items():
        for key, value in saved.get(name, {}).items():
            if shape and tuple(getattr(value, "shape", ())) == shape:
                keys.add(key)
    if not any(shapes.values()):
        keys = {key for name in shapes for key in saved.get(name, {}) if key != "step"}
    return keys


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(value), torch.as_tensor(other)))
    return bool(value == other)
