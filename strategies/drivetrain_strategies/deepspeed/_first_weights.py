"""Gives the module of every rank rank 0's weights, as ZeRO computes with them, and keeps them before they are rounded.

DeepSpeed would build its master weights from parameters that are already rounded to half precision.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.strategies import ControlPlane
from drivetrain_strategies._deferred_init import DeferredModule
from drivetrain_strategies.deepspeed._internals import Part, on_drive, partitioned_span
from drivetrain_strategies.deepspeed._state import State


@torch.no_grad()
def broadcast_weights(module: nn.Module, device: torch.device, half_dtype: torch.dtype | None, state: State) -> None:
    """Broadcast and round the weights for stages 1 and 2. Collective.

    Unrounded weights are kept in host memory, so that the device holds only one of them at a time.

    Args:
        module: the user's module.
        device: the device that the run computes on.
        half_dtype: dtype to which weights are rounded; None keeps their dtype.
        state: keeps the weights that are rounded, each as a whole.
    """
    for parameter in module.parameters():
        weights = parameter.data = parameter.data.to(device)
        dist.broadcast(weights, 0)
        if half_dtype is not None and weights.dtype != half_dtype:
            parameter.data = weights.to(half_dtype)
            state.keep(Part(parameter, weights.cpu(), None))
    module.to(device)  # the parameters are on the device already, so only buffers are moved


class Partitioner:
    """Broadcasts and partitions a module's parameters for stage 3 with DeepSpeed's `zero.Init`, one at a time.

    Args:
        config: the resolved configuration.
        half_dtype: dtype to which parameters are rounded; None keeps their dtype.
        device: the device that the run computes on.
        state: keeps this rank's part of each parameter, unrounded.
    """

    def __init__(
        self, config: dict[str, Any], half_dtype: torch.dtype | None, device: torch.device, state: State
    ) -> None:
        from deepspeed.runtime.zero.partition_parameters import Init

        # No dtype is passed, since Init ignores it on devices without fp16.
        self._init = Init(config_dict_or_path=config)
        if config["zero_optimization"].get("memory_efficient_linear", True):
            self._init._enable_mem_efficient_linear()
        self._half_dtype = half_dtype
        self._device = device
        self._state = state

    @torch.no_grad()
    def partition_module(self, module: nn.Module, deferred: DeferredModule, control: ControlPlane) -> None:
        """Partition all parameters, those that were built on the meta device as they get their values. Collective."""
        self._materialize(module, deferred, control)
        for parameter in module.parameters():
            if not parameter.is_meta and not hasattr(parameter, "ds_id"):
                self._partition(parameter)
        for child in module.modules():
            for name, buffer in child._buffers.items():
                if buffer is not None:
                    child._buffers[name] = buffer.to(self._device)

    def _partition(self, parameter: Any) -> None:
        data = parameter.data.to(self._device)
        dist.broadcast(data, 0)
        parameter.data = data if self._half_dtype is None else data.to(self._half_dtype)
        self._init._convert_to_deepspeed_param(parameter)
        parameter.partition()
        span = partitioned_span(parameter)
        if data.dtype == parameter.dtype and not on_drive(parameter):
            local = parameter.ds_tensor.detach()[: span.numel]
        else:
            local = data.reshape(-1)[span.start : span.stop].clone()
        self._state.keep(Part(parameter, local, span))

    def _materialize(self, module: nn.Module, deferred: DeferredModule, control: ControlPlane) -> None:
        """Give parameters on the meta device their values. They stay the same objects: optimizers may hold them."""
        has_meta = deferred.find_in(module)
        parameters: dict[str, Any] = dict(module.named_parameters())
        for parameter in parameters.values():
            if parameter.is_meta and parameter.grad_fn is not None:
                parameter.detach_()  # swap_tensors refuses parameters to which an autograd graph refers

        def assign(name: str, value: torch.Tensor) -> None:
            parameter = parameters[name]
            materialized = nn.Parameter(
                value.detach().to(self._device, parameter.dtype, copy=True), requires_grad=parameter.requires_grad
            )
            attributes = dict(parameter.__dict__)
            hooks, gradient_hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
            torch.utils.swap_tensors(parameter, materialized)  # type: ignore[no-untyped-call]
            # The swap leaves these with the meta tensor. Handles of hooks refer to the same dicts as before.
            parameter.__dict__.update(attributes)
            parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks, gradient_hooks
            self._partition(parameter)

        recurrent_layers = [child for child in module.modules() if has_meta and isinstance(child, nn.RNNBase)]
        for layer in recurrent_layers:
            layer._flat_weight_refs = []  # swap_tensors refuses weakly referenced tensors
        deferred.materialize(assign, self._device, control)
        for layer in recurrent_layers:
            layer._init_flat_weights()
