"""Reads and writes float32 weights and optimizer state by the names of the user's parameters.

Each rank handles only its part of a tensor.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from drivetrain.errors import CheckpointError
from drivetrain.strategies import ParameterShard, Region, Span, check_optimizer_fits, cut, load_tensors
from drivetrain_strategies.deepspeed._internals import Part, Zero, is_gathered, write_part


class State:
    """The state of a module under DeepSpeed.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._zero: Zero | None = None
        self.trained: dict[int, Part] = {}
        self._parts: dict[int, Part] = {}

    def keep(self, part: Part) -> None:
        """Keep a parameter's values as they were before the parameter was rounded or partitioned."""
        self._parts[id(part.parameter)] = part

    @torch.no_grad()
    def use_masters(self, zero: Zero) -> None:
        """Use the master weights of trained parameters. DeepSpeed has built them from rounded weights."""
        kept, self._zero = self._parts, zero
        self.trained = {id(part.parameter): part for part in zero.parts()}
        self._parts = {key: part for key, part in kept.items() if key not in self.trained} | self.trained
        rounded = {key for key, part in kept.items() if part.tensor.dtype != part.parameter.dtype}
        for part in self.parts(rounded & self.trained.keys(), write=True):
            _write(part, _value(kept.pop(id(part.parameter))))

    def parts(self, wanted: Container[int] | None = None, write: bool = False) -> Iterator[Part]:
        """Yield the `Part` of each parameter that is not simply in the module, valid until the next one is requested.

        Args:
            wanted: ids of the parameters; None selects all.
            write: whether changes are written back to a drive.
        """
        for number, parts in groupby(self._parts.values(), attrgetter("flat_index")):
            selected = [part for part in parts if wanted is None or id(part.parameter) in wanted]
            if selected and self._zero is not None:
                with self._zero.swapped_in(number, write):
                    yield from selected
            else:
                yield from selected

    def whole_values(self) -> dict[int, torch.Tensor]:
        """Return the values that this rank holds as a whole, by ``id`` of the parameter."""
        return {key: part.tensor for key, part in self._parts.items() if part.span is None}

    def sharded_nbytes(self) -> int:
        """Return the number of bytes of all sharded parameters."""
        return sum(part.nbytes for part in self._parts.values() if part.span is not None)

    @property
    def _active_zero(self) -> Zero:
        assert self._zero is not None
        return self._zero

    # Weights

    def weights(self) -> dict[str, Any]:
        """Return parameters and persistent buffers by name. The names of a tied parameter share one object."""
        values: dict[int, Any] = {id(part.parameter): _value(part) for part in self.parts()}
        state: dict[str, Any] = {}
        for name, value in self._module.state_dict(keep_vars=True).items():
            is_tensor = isinstance(value, torch.Tensor)
            state[name] = values.setdefault(id(value), value.detach()) if is_tensor else value
        return state

    def regions(self) -> dict[str, Region]:
        regions: dict[str, Region] = {}
        for name, value in self._module.state_dict(keep_vars=True).items():
            part = self._parts.get(id(value))
            if part is not None and part.span is not None:
                regions[name] = part.span
        return regions

    @torch.no_grad()
    def load_weights(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load parameters and buffers by name. Collective.

        Raises:
            CheckpointError: names or shapes do not match and ``strict`` is set. No weights were loaded.
        """
        wanted: dict[int, Any] = {}

        def assign(tensor: torch.Tensor, value: Any) -> None:
            if id(tensor) in self._parts:
                wanted[id(tensor)] = value
            else:
                tensor.copy_(part_of(value, None))

        load_tensors(self._module, state, strict, assign, self._parts)
        for part in self.parts(wanted, write=True):
            _write(part, wanted[id(part.parameter)])
        self.update_compute_weights()

    @torch.no_grad()
    def update_compute_weights(self) -> None:
        """Copy unrounded and master weights into the weights that the module computes with. Collective."""
        for part in self._parts.values():
            if part.span is None:
                part.parameter.data.copy_(part.tensor)
            elif part.flat_index is None:
                write_part(part.parameter, part.tensor, part.span)
        if self._zero is not None:
            self._zero.update_compute_weights()

    @torch.no_grad()
    def adopt_compute_weights(self) -> None:
        """Write values that user code gave to the module's parameters into the master weights. Does not communicate."""
        zero = self._active_zero
        held = {key for key, part in self.trained.items() if zero.stage < 3 or is_gathered(part.parameter)}
        for part in self.parts(held, write=True):
            master = part.local
            new = cut(part.parameter.detach(), part.span).to(master.device)
            # A master weight is more exact than the value that was rounded from it.
            master.copy_(torch.where(new == master.to(new.dtype), master, new.to(master.dtype)))
            if zero.stage == 3:
                assert part.span is not None
                write_part(part.parameter, new, part.span)

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter], device: torch.device, write: bool) -> Iterator[None]:
        """Assign whole master weights to the given parameters within this context. Collective.

        Args:
            parameters: the parameters.
            device: the device of the whole weights.
            write: whether rank 0's changes are kept, on all ranks.
        """
        data_before = {id(parameter): parameter.data for parameter in parameters}
        with torch.no_grad():
            for part in self.parts(data_before):
                part.parameter.data = whole_of(_value(part)).to(device)
        try:
            yield
            if write:
                with torch.no_grad():
                    for part in self.parts(data_before, write=True):
                        dist.broadcast(part.parameter.data, 0)
                        _write(part, part.parameter.data)
        finally:
            for parameter in parameters:
                parameter.data = data_before[id(parameter)]
        if write:
            self.update_compute_weights()

    # State of the optimizer

    def optimizer(self) -> dict[str, Any]:
        """Return state and parameter groups by parameter names. Parameters without state yet are left out."""
        optimizer = self._active_zero.base_optimizer
        state: dict[str, Any] = {}
        for part in self.parts(self.trained):
            if values := optimizer.state.get(part.tensor):
                _check_sliceable(values, optimizer)
                state[self.names[id(part.parameter)]] = {
                    key: _value(part, value)
                    if isinstance(value, torch.Tensor) and value.shape == part.tensor.shape
                    else value
                    for key, value in values.items()
                }
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": names}
            for group, names in zip(optimizer.param_groups, self._groups(), strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def optimizer_regions(self) -> dict[str, Region]:
        # Scalar parameters are left out. Their state has the shape of a step counter, which must not be sharded.
        return {self.names[key]: part.span for key, part in self.trained.items() if part.shape and part.span}

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
        for number, same_tensor in groupby(self.trained.values(), attrgetter("flat_index")):
            parts = {self.names[id(part.parameter)]: part for part in same_tensor}
            flat = next(iter(parts.values())).tensor
            with zero.swapped_in(number, write=True):
                # DeepSpeed identifies tensors on a drive by object, so the existing objects must be reused.
                reusable = optimizer.state.get(flat, {}) if zero.is_swapped(number) else {}
                optimizer.state[flat] = _flattened(flat, parts, reusable, saved["state"])
        zero.relink_state()

    def _groups(self) -> list[list[str]]:
        """Return the parameter names of each group, in module order."""
        groups: list[list[str]] = [[] for _ in self._active_zero.base_optimizer.param_groups]
        for number, parts in groupby(self.trained.values(), attrgetter("flat_index")):
            names = [self.names[id(part.parameter)] for part in parts]
            groups[self._active_zero.group_of_flat_tensor(number)] += names
        return groups


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
    """Return a whole copy of a value of a state. Collective if the value is a shard."""
    if isinstance(value, ParameterShard):
        return value.full_tensor()
    return value.clone() if isinstance(value, torch.Tensor) else value


def _value(part: Part, tensor: torch.Tensor | None = None) -> torch.Tensor | ParameterShard:
    """Return a part's values, or its elements of another tensor of the same shape, as a checkpoint stores them."""
    local = part.cut_from(part.tensor if tensor is None else tensor)
    local = local.clone() if part.is_swapped else local
    if part.span is None:
        return local
    return ParameterShard(local, part.shape, part.span, gather=partial(gather, local, part.shape, part.span))


def _write(part: Part, value: Any) -> None:
    part.local.copy_(part_of(value, part.span).view_as(part.local))


def _check_sliceable(values: Mapping[str, Any], optimizer: Optimizer) -> None:
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


def _flattened(
    flat: torch.Tensor, parts: Mapping[str, Part], reusable: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Build one flat tensor's state from its parameters' states, reusing the tensors in ``reusable``."""
    state: dict[str, Any] = {}
    set_by: dict[str, str] = {}
    elementwise = _elementwise_keys({name: part.shape for name, part in parts.items()}, saved)
    for name, part in parts.items():
        for key, value in saved.get(name, {}).items():
            if key in elementwise:
                if key not in state:
                    state[key] = (
                        reusable[key].zero_() if key in reusable else torch.zeros_like(flat, requires_grad=False)
                    )
                part.cut_from(state[key]).copy_(part_of(value, part.span).reshape(-1))
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
