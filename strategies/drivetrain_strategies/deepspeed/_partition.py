"""Broadcasts and partitions a module's parameters for stage 3, one parameter at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.strategies import ControlPlane, Span
from drivetrain_strategies._deferred_init import DeferredModule
from drivetrain_strategies.deepspeed._internals import on_drive
from drivetrain_strategies.deepspeed._state import StoredParameter


class Partitioner:
    """Partitions a module's parameters with DeepSpeed's `zero.Init`, and keeps this rank's part unrounded.

    Without the unrounded parts, the master weights would be built from parameters that are rounded to half precision.

    Args:
        config: the resolved configuration.
        half_dtype: half-precision dtype to which parameters are rounded. None keeps the parameters' dtype.
        device: the device that the run computes on.
    """

    def __init__(self, config: dict[str, Any], half_dtype: torch.dtype | None, device: torch.device) -> None:
        from deepspeed.runtime.zero.partition_parameters import Init

        # No dtype is passed, since Init ignores it on devices without fp16.
        self._init = Init(config_dict_or_path=config)
        if config["zero_optimization"].get("memory_efficient_linear", True):
            self._init._enable_mem_efficient_linear()
        self._half_dtype = half_dtype
        self._device = device
        self.unrounded: dict[int, StoredParameter] = {}
        """This rank's unrounded parts, by ``id`` of the parameter."""

    @torch.no_grad()
    def partition(self, parameter: nn.Parameter) -> None:
        """Partition one parameter. Collective."""
        data = parameter.data.to(self._device)
        dist.broadcast(data, 0)
        shape, numel = tuple(data.shape), data.numel()
        parameter.data = data if self._half_dtype is None else data.to(self._half_dtype)
        self._init._convert_to_deepspeed_param(parameter)
        parameter.partition()  # type: ignore[attr-defined]
        partition = parameter.ds_tensor  # type: ignore[attr-defined]
        size = partition.ds_numel
        start = min(parameter.ds_zero_partition_rank * size, numel)  # type: ignore[attr-defined]
        span = Span(start, min(start + size, numel))
        if data.dtype == parameter.dtype and not on_drive(parameter):
            local = partition.detach()[: span.stop - span.start]
        else:
            local = data.reshape(-1)[span.start : span.stop].clone()
        self.unrounded[id(parameter)] = StoredParameter(local, shape, span)

    def partition_all(self, module: nn.Module) -> None:
        """Partition all parameters that are not on the meta device and not partitioned yet. Collective."""
        for parameter in module.parameters():
            if not parameter.is_meta and not hasattr(parameter, "ds_id"):
                self.partition(parameter)

    def materialize(self, module: nn.Module, deferred: DeferredModule, control: ControlPlane) -> None:
        """Give a module that was built on the meta device its values, and partition each parameter. Collective.

        Parameters stay the same objects, since optimizers may hold them.
        """
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
            self.partition(parameter)

        recurrent_layers = [child for child in module.modules() if has_meta and isinstance(child, nn.RNNBase)]
        for layer in recurrent_layers:
            layer._flat_weight_refs = []  # swap_tensors refuses weakly referenced tensors
        deferred.materialize(assign, self._device, control)
        for layer in recurrent_layers:
            layer._init_flat_weights()
