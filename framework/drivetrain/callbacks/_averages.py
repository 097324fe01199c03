"""Averages of a module's weights, sharded across ranks like the weights themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain._distributed.shards import ParameterShard, Region
from drivetrain.strategies.strategy import Strategy

Average = Callable[[list[Tensor], list[Tensor], int], None]
"""Updates averages in place from ``(averages, weights, updates so far)``; all tensors have one dtype and device."""


class Averages:
    """Averages of a module's trainable parameters and, optionally, of its floating-point buffers.

    Averages have at least float32 precision and live on the device of their weights. Each rank averages only its own
    part: its shard of a sharded weight, its partition of ZeRO's float32 master weights. Frozen parameters have no
    average and take no memory.

    Args:
        strategy: the strategy that has set up the module.
        module: the module to average.
        buffers: whether to average persistent buffers too. Otherwise the module's buffers are used as they are.
    """

    def __init__(self, strategy: Strategy, module: nn.Module, buffers: bool) -> None:
        self._strategy = strategy
        self._module = module
        self._buffers = buffers
        self.of: dict[str, Tensor] = {}
        """This rank's part of each average, by the weight's name."""
        self._weights: dict[str, Tensor] = {}  # views of the trained weights, or copies of them
        self._pairs: list[tuple[list[Tensor], list[Tensor]]] = []  # averages and weights, by device and dtype
        self._copied = False  # the strategy returns copies, which do not change with the weights
        self._parameters: list[Tensor] = []  # parameters that share storage with `_weights`
        self._buffer_slots: list[tuple[dict[str, Tensor | None], str]] = []
        self._places: tuple[int, ...] = ()
        self._training: dict[str, Tensor] = {}  # the trained weights, while the averages are in the module

    @property
    def in_place(self) -> bool:
        """Whether the averages are in the module."""
        return bool(self._training)

    @torch.no_grad()
    def follow(self) -> None:
        """Collect the weights to average. A newly trainable weight starts with its current value as average."""
        held = self._held()
        again = self._held()
        self._copied = any(held[name].data_ptr() != again[name].data_ptr() for name in held)
        self._weights = held
        for name, weight in held.items():
            if name not in self.of or self.of[name].shape != weight.shape:  # buffers may change their shape
                self.of[name] = weight.to(_wide(weight.dtype), copy=True)
        by_kind: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for name, weight in held.items():
            kind = type(weight), weight.device, weight.dtype
            averages, weights = by_kind.setdefault(kind, ([], []))
            averages.append(self.of[name])
            weights.append(weight)
        self._pairs = list(by_kind.values())
        parameters = self._strategy.named_parameters()
        self._parameters = [
            one for name, one in parameters.items() if name in held and held[name].data_ptr() == one.data_ptr()
        ]
        self._buffer_slots = [
            (layer._buffers, name)
            for prefix, layer in self._module.named_modules()
            for name, buffer in layer._buffers.items()
            if (f"{prefix}.{name}" if prefix else name) in held or (buffer is None and self._buffers)
        ]
        self._places = self._where()

    @torch.no_grad()
    def update(self, average: Average, count: int) -> None:
        """Update the averages with the current weights.

        Args:
            average: computes the new averages.
            count: updates so far; the first update copies the weights.
        """
        if self._copied or self._where() != self._places:
            self.follow()
        for averages, weights in self._pairs:
            wide = [one.to(averages[0].dtype) for one in weights] if weights[0].dtype != averages[0].dtype else weights
            if count == 0:
                torch._foreach_copy_(averages, wide)
            else:
                average(averages, wide, count)

    @torch.no_grad()
    def exchange(self) -> None:
        """Load the averages into the module (rank 0's averages of buffers) and save its weights. Collective."""
        self._training = {name: weight.clone() for name, weight in self._held().items() if name in self.of}
        self._load({name: self.of[name] for name in self._training})
        if self._buffers:
            self._strategy.sync_buffers(self._module)

    def restore(self) -> None:
        """Load the weights that `exchange` saved back into the module, bit for bit. Collective."""
        training, self._training = self._training, {}
        self._load(training)

    # In a checkpoint

    def state(self) -> dict[str, Any]:
        """Return this rank's part of each average and, while the averages are in the module, of the trained weights."""
        state = self._as_held(self.of)
        return state | {f"{_TRAINING}{name}": one for name, one in self._as_held(self._training).items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned, saved under any strategy."""
        training = {}
        for name, value in state.items():
            if name.startswith(_TRAINING):
                training[name.removeprefix(_TRAINING)] = value
                continue
            local = value.local if isinstance(value, ParameterShard) else value
            self.of[name] = local.to(_wide(local.dtype), copy=True)
        if training:
            self._strategy.load_model_state(training, strict=False)
        held = self._held()
        for name, weight in held.items():
            if name in self.of:
                self.of[name] = self.of[name].to(weight.device, _wide(weight.dtype))
        self.follow()

    # This rank's part of the weights

    def _where(self) -> tuple[int, ...]:
        """Return the addresses of weights and buffers; they change when ``.data`` or a buffer is assigned."""
        buffers = (slot.get(name) for slot, name in self._buffer_slots)
        return *map(_PLACE, self._parameters), *(0 if one is None else one.data_ptr() for one in buffers)

    def _held(self) -> dict[str, Tensor]:
        return {name: one.local if isinstance(one, ParameterShard) else one for name, one in self._values().items()}

    def _values(self) -> dict[str, Any]:
        """Return the values to average, by name, as the strategy holds them; tied weights appear once."""
        trains = {
            name for name, one in self._strategy.named_parameters().items() if one.requires_grad or name in self.of
        }
        parameters = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        once = {name for name, _ in self._module.named_buffers()} if self._buffers else set()
        found = {}
        state: Mapping[str, Any] = self._strategy.model_state()
        for name, value in state.items():
            wanted = name in trains if name in parameters else name in once
            if wanted and isinstance(value, Tensor | ParameterShard) and _has_a_mean(value.dtype):
                found[name] = self._strategy.shard_of(value)
        return found

    def _load(self, locals_: Mapping[str, Tensor]) -> None:
        self._strategy.load_model_state(self._as_held(locals_), strict=False)

    def _as_held(self, locals_: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the values as the strategy holds them, with this rank's part replaced by ``locals_``."""
        if not locals_:
            return {}
        return {
            name: replace(one, local=locals_[name], gather=None) if isinstance(one, ParameterShard) else locals_[name]
            for name, one in self._values().items()
            if name in locals_
        }


_PLACE = Tensor.data_ptr  # a C function: `map` applies it without a Python call per parameter

_TRAINING = "training: "
"""Prefix of the names of trained weights that are saved while the averages are in the module."""


def regions_of_averages(strategy: Strategy) -> dict[str, Region]:
    """Return the regions of the tensors of `Averages.state` that this rank loads."""
    regions = strategy.model_regions()
    return {**regions, **{f"{_TRAINING}{name}": region for name, region in regions.items()}}


def _has_a_mean(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
