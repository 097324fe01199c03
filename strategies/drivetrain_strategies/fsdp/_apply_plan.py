"""Applies a plan to a module: shards its parameters, gives them their first values, and sets prefetching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from drivetrain.precision import Precision
from drivetrain.strategies import ControlPlane
from drivetrain_strategies._deferred_init import DeferredModule
from drivetrain_strategies._step_module import StepModule
from drivetrain_strategies.fsdp._device_mesh import Mesh
from drivetrain_strategies.fsdp._internals import Sharded, forget_original
from drivetrain_strategies.fsdp._original_parameters import Original
from drivetrain_strategies.fsdp._plan import Plan
from drivetrain_strategies.fsdp._state import in_layout_of


def shard(
    root: StepModule,
    plan: Plan,
    mesh: Mesh,
    originals: Sequence[Original],
    reshard_after_forward: bool | None,
    **options: Any,
) -> FSDPModule:
    """Shard the units from the innermost outwards, then ``root``. Collective.

    Each unit's parameters are broadcast from rank 0 before the unit is sharded. Afterwards the full storage of the
    parameters is freed.

    Args:
        root: the module that runs the steps.
        plan: the units of the user's module.
        mesh: the mesh to shard over.
        originals: the module's parameters, which shards replace.
        reshard_after_forward: passed to `fully_shard` for all units except the root. The root uses torch's default.
        **options: passed to `fully_shard` for all units.
    """
    originals_by_id = {id(original.parameter): original for original in originals}
    options["mesh"] = mesh.data
    replicated = set(plan.replicated.values())
    ignored = replicated | set(plan.ties)
    if plan.ties:
        # Tied parameters are registered on the root. `fully_shard` then finds all modules that share a tied parameter.
        root.ties = nn.ParameterList(plan.ties)
    for unit in plan.units:
        mesh.broadcast(unit.parameters)
        if unit is plan.root:
            fully_shard(root, ignored_params=replicated, **options)
        else:
            fully_shard(unit.module, ignored_params=ignored, reshard_after_forward=reshard_after_forward, **options)
        for parameter in unit.parameters:
            forget_original(parameter)
            originals_by_id[id(parameter)].free_storage()
    sharded = cast(FSDPModule, root)
    if mesh.data.device_type == "cpu":
        for child in root.modules():
            if isinstance(child, FSDPModule):
                child.set_force_sum_reduction_for_comms(True)  # gloo does not support ReduceOp.PREMUL_SUM
    return sharded


def materialize(
    deferred: DeferredModule,
    originals: Sequence[Original],
    sharded: Sharded,
    plan: Plan,
    device: torch.device,
    control: ControlPlane,
) -> None:
    """Give parameters that were built on the meta device their first values, one whole tensor at a time. Collective.

    Each rank keeps its shards, and whole values of what is replicated.
    """
    sharded.give_storage(device)
    replicated = {id(parameter): name for name, parameter in plan.replicated.items()}
    by_name = {original.name: original for original in originals if original.parameter.is_meta}
    for original in by_name.values():
        if id(original.parameter) in replicated:
            empty = torch.empty_like(original.parameter, device=device)
            parameter = nn.Parameter(empty, requires_grad=original.parameter.requires_grad)
            original.register(parameter)
            plan.replicated[replicated[id(original.parameter)]] = parameter

    def assign(name: str, value: torch.Tensor) -> None:
        current: Any = by_name[name].current
        part: Any = in_layout_of(value.to(current.dtype), current)
        if isinstance(current, DTensor):
            current.to_local().copy_(part.to_local())
        else:
            current.data.copy_(part)

    deferred.materialize(assign, device, control)


def set_prefetch(plan: Plan, forward: int, backward: int) -> None:
    """Set how many following units each unit prefetches, in module order. 0 keeps torch's default."""
    modules = [cast(FSDPModule, unit.module) for unit in plan.units_in_module_order()]
    for depth, ordered, method in (
        (forward, modules, FSDPModule.set_modules_to_forward_prefetch),
        (backward, modules[::-1], FSDPModule.set_modules_to_backward_prefetch),
    ):
        for position, module in enumerate(ordered):
            modules_ahead = ordered[position + 1 : position + 1 + depth]
            if modules_ahead:
                method(module, modules_ahead)


# Policies of `fully_shard`


def mixed_precision_policy(precision: Precision) -> MixedPrecisionPolicy:
    """Return the policy for a precision: parameters are gathered in their own dtype.

    Under a mixed precision, autocast rounds per operation, as under other strategies. Operations that autocast runs in
    float32 (norms, softmax, losses, embeddings) read float32 parameters. If the parameters were gathered in half
    precision, they would be rounded once more than under other strategies. Forward inputs are never cast, because the
    root's input is a batch, which includes the targets.
    """
    return MixedPrecisionPolicy(reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False)


def offload_policy(cpu_offload: bool | OffloadPolicy, device: torch.device) -> OffloadPolicy:
    """Return torch's offload policy. Host memory is pinned unless the device is the CPU."""
    if isinstance(cpu_offload, OffloadPolicy):
        return cpu_offload
    return CPUOffloadPolicy(pin_memory=device.type != "cpu") if cpu_offload else OffloadPolicy()
