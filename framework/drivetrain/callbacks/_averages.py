"""Averages of a module's weights, sharded across ranks like the weights themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain._distributed.shards import ParameterShard
from drivetrain._parameters.trainable import get_requires_grad
from drivetrain.strategies.strategy import Strategy

Average = Callable[[list[Tensor], list[Tensor], int], None]
"""A function of ``(averages, weights, updates so far)`` that updates averages in place, all on one device."""


class Averages:
    """Averages of a module's trainable parameters and, optionally, of its running statistics.

    Averages have at least float32 precision and live on the device of their weights. Each rank averages only its own
    part of the weights, such as its shard of a sharded weight or its partition of ZeRO's float32 master weights. Frozen
    parameters have no average and take no memory.

    Args:
        strategy: the strategy that has set up the module.
        module: the module to average.
        buffers: whether to also average persistent buffers that are running statistics: those whose name begins with
            ``running_``. All other buffers are used as they are.
    """

    def __init__(self, strategy: Strategy, module: nn.Module, buffers: bool) -> None:
        self._strategy = strategy
        self._module = module
        self._buffers = buffers
        self.averages: dict[str, Tensor] = {}
        """This rank's part of each average, by the weight's name."""
        self.has_new_parameters = True
        """Whether parameters were registered since the weights were collected."""
        self._all_parameters: list[Tensor] = []
        self._requires_grad_flags: tuple[bool, ...] = ()
        # Averages and weights, by device and dtype. The weights are views of the trained weights, or copies of them.
        self._pairs: list[tuple[list[Tensor], list[Tensor]]] = []
        self._weights_are_copies = False  # whether the weights are copies, which do not follow the training
        self._parameters: list[Tensor] = []  # parameters that share storage with the weights
        self._buffer_slots: list[tuple[dict[str, Tensor | None], str]] = []
        self._addresses: tuple[int, ...] = ()
        self._trained_weights: dict[str, Tensor] = {}  # the trained weights, while the averages are in the module
        self._trained_buffers: dict[str, Tensor] = {}  # copies that `keep_trained_buffers` has made

    @property
    def swapped_in(self) -> bool:
        """Whether the averages are in the module."""
        return bool(self._trained_weights)

    def must_collect(self) -> bool:
        """Return whether other parameters are trainable than when the weights were collected."""
        flags = tuple(map(get_requires_grad, self._all_parameters))
        return self.has_new_parameters or flags != self._requires_grad_flags

    @torch.no_grad()
    def collect_weights(self) -> None:
        """List the weights to average. The average of a newly trainable weight starts with the weight's value."""
        local_weights = self._local_weights()
        second = self._local_weights()
        self._weights_are_copies = any(
            weight.data_ptr() != second[name].data_ptr() for name, weight in local_weights.items()
        )
        for name, weight in local_weights.items():
            if name not in self.averages or self.averages[name].shape != weight.shape:  # A buffer may change its shape.
                self.averages[name] = weight.to(_average_dtype(weight.dtype), copy=True)
        by_type: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for name, weight in local_weights.items():
            type_key = type(weight), weight.device, weight.dtype
            averages, weights = by_type.setdefault(type_key, ([], []))
            averages.append(self.averages[name])
            weights.append(weight)
        self._pairs = list(by_type.values())
        parameters = self._strategy.named_parameters()
        self._all_parameters = list(parameters.values())
        self._requires_grad_flags = tuple(map(get_requires_grad, self._all_parameters))
        self.has_new_parameters = False
        self._parameters = [
            parameter
            for name, parameter in parameters.items()
            if name in local_weights and local_weights[name].data_ptr() == parameter.data_ptr()
        ]
        self._buffer_slots = [
            (layer._buffers, name)
            for prefix, layer in self._module.named_modules()
            for name, buffer in layer._buffers.items()
            if (f"{prefix}.{name}" if prefix else name) in local_weights or (buffer is None and self._buffers)
        ]
        self._addresses = self._current_addresses()

    @torch.no_grad()
    def update(self, average: Average, count: int) -> None:
        """Update the averages with the current weights.

        Args:
            average: the function that computes the new averages.
            count: the number of updates so far. The first update copies the weights.
        """
        if self._weights_are_copies or self._current_addresses() != self._addresses:
            self.collect_weights()
        for averages, weights in self._pairs:
            if weights[0].dtype != averages[0].dtype:
                weights = [weight.to(averages[0].dtype) for weight in weights]
            if count == 0:
                torch._foreach_copy_(averages, weights)
            else:
                average(averages, weights, count)

    @torch.no_grad()
    def swap_in(self) -> None:
        """Load the averages into the module, and keep a copy of the trained weights. A collective operation.

        All ranks load the averages of buffers from rank 0.
        """
        self._trained_weights = {
            name: weight.clone() for name, weight in self._local_weights().items() if name in self.averages
        }
        averages = {name: self.averages[name] for name in self._trained_weights}
        self._strategy.load_model_state(self._as_strategy_state(averages), strict=False)
        if self._buffers:
            self._strategy.sync_buffers(self._module)

    def swap_out(self) -> None:
        """Restore the trained weights and buffers that were copied, bit for bit. A collective operation."""
        trained = self.trained_state()
        self._trained_weights, self._trained_buffers = {}, {}
        self._strategy.load_model_state(trained, strict=False)

    @torch.no_grad()
    def keep_trained_buffers(self) -> None:
        """Keep copies of the trained buffers, which are about to be replaced by buffers that fit the averages."""
        self._trained_buffers = {name: buffer.clone() for name, buffer in self._buffer_values().items()}

    # State in checkpoints

    def state(self) -> dict[str, Any]:
        """Return this rank's part of each average, and the buffers that fit the averages, if there are such buffers."""
        averages = self._as_strategy_state(self.averages)
        return {**averages, **self._buffer_values()} if self._trained_buffers else averages

    def trained_state(self) -> dict[str, Any]:
        """Return this rank's part of the trained weights and buffers that the module lacks, because it has averages."""
        return {**self._trained_buffers, **self._as_strategy_state(self._trained_weights)}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned in a run with any strategy."""
        not_averaged = self._buffer_values().keys() - self._averaged_buffers()
        for name, value in state.items():
            if name in not_averaged:
                continue
            local = value.local if isinstance(value, ParameterShard) else value
            self.averages[name] = local.to(_average_dtype(local.dtype), copy=True)
        for name, weight in self._local_weights().items():
            if name in self.averages:
                self.averages[name] = self.averages[name].to(weight.device, _average_dtype(weight.dtype))
        self.collect_weights()

    # This rank's part of the weights

    def _current_addresses(self) -> tuple[int, ...]:
        """Return the addresses of weights and buffers, which change when ``.data`` or a buffer is assigned."""
        buffers = (slot.get(name) for slot, name in self._buffer_slots)
        return *map(_DATA_PTR, self._parameters), *(0 if value is None else value.data_ptr() for value in buffers)

    def _local_weights(self) -> dict[str, Tensor]:
        return {
            name: value.local if isinstance(value, ParameterShard) else value
            for name, value in self._averaged_values().items()
        }

    def _averaged_values(self) -> dict[str, Any]:
        """Return the values to average, by name, as the strategy holds them. Tied weights appear once."""
        trainable = {
            name
            for name, value in self._strategy.named_parameters().items()
            if value.requires_grad or name in self.averages
        }
        parameters = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        averaged_buffers = self._averaged_buffers()
        values = {}
        state: Mapping[str, Any] = self._strategy.model_state()
        for name, value in state.items():
            wanted = name in trainable if name in parameters else name in averaged_buffers
            if wanted and isinstance(value, Tensor | ParameterShard) and _is_averageable(value.dtype):
                values[name] = self._strategy.shard_of(value)
        return values

    def _averaged_buffers(self) -> set[str]:
        """Return the names of the buffers to average.

        A mean of other buffers need not be a valid value: that of unit vectors (spectral norm) is shorter.
        """
        if not self._buffers:
            return set()
        names = [name for name, _ in self._module.named_buffers()]
        return {name for name in names if name.rpartition(".")[2].startswith("running_")}

    def _buffer_values(self) -> dict[str, Tensor]:
        """Return the module's persistent buffers that this rank holds whole, by name."""
        names = {name for name, _ in self._module.named_buffers()}
        state: Mapping[str, Any] = self._strategy.model_state()
        values = {name: self._strategy.shard_of(value) for name, value in state.items() if name in names}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _as_strategy_state(self, parts: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the values as the strategy holds them, with this rank's part replaced by the value in ``parts``."""
        if not parts:
            return {}
        return {
            name: replace(value, local=parts[name], gather=None) if isinstance(value, ParameterShard) else parts[name]
            for name, value in self._averaged_values().items()
            if name in parts
        }


_DATA_PTR = Tensor.data_ptr  # a C function, which `map` applies without a Python call per parameter


def _is_averageable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _average_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
