"""Applies a plan to a module: activation checkpointing, compilation, sharding and prefetching, in this order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from drivetrain_strategies._activation_checkpointing import ForwardSwap, outermost_modules
from drivetrain_strategies._half_norms import half_precision_norms, with_float32_weights
from drivetrain_strategies._step_module import StepModule
from drivetrain_strategies.fsdp._broadcast_init import broadcast_from_rank_0
from drivetrain_strategies.fsdp._device_mesh import Mesh
from drivetrain_strategies.fsdp._internals import forget_original
from drivetrain_strategies.fsdp._original_parameters import Original
from drivetrain_strategies.fsdp._plan import Plan, Unit


@dataclass(frozen=True, slots=True)
class ShardingOptions:
    """Options of `fully_shard`.

    Attributes:
        reshard_after_forward: passed to `fully_shard` for all units except the root. The root uses torch's default.
        precision: the dtypes in which parameters are gathered and gradients are reduced.
        offload: where shards are stored.
        device: the device that the rank computes on.
    """

    reshard_after_forward: bool | None
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    device: torch.device


def change_forwards(
    module: nn.Module,
    plan: Plan,
    classes: Sequence[type[nn.Module]] | None,
    checkpointing: Callable[[Callable[..., Any]], Callable[..., Any]],
    compile_options: dict[str, Any] | None,
    gathered_in_half: bool = False,
) -> ForwardSwap:
    """Wrap forwards in activation checkpointing, then in compilation. FSDP's hooks, added later, run around both.

    If weights are gathered in half precision, normalization layers compute in float32 where their kernels require it.

    Args:
        module: the bare module.
        plan: the plan. Each of its units except the root is compiled.
        classes: classes of modules to checkpoint; None checkpoints nothing.
        checkpointing: wraps a forward in activation checkpointing.
        compile_options: options for `torch.compile`; None compiles nothing.
        gathered_in_half: whether float32 weights are gathered in half precision.
    """
    swap = ForwardSwap()
    if gathered_in_half:
        for norm in half_precision_norms(module):
            swap.put(norm, partial(with_float32_weights, norm))
    if classes is not None:
        for block in outermost_modules(module, classes):
            swap.put(block, checkpointing)
    if compile_options is not None:
        for unit in plan.units[:-1]:
            swap.put(unit.module, lambda forward: torch.compile(forward, **compile_options))
    return swap


def shard(
    root: StepModule, plan: Plan, mesh: Mesh, sharding: ShardingOptions, originals: Sequence[Original]
) -> FSDPModule:
    """Shard the units from the innermost outwards, then ``root``. Collective.

    Each unit's parameters are broadcast from rank 0 before the unit is sharded. Afterwards the full storage of the
    parameters is freed.
    """
    originals_by_id = {id(original.parameter): original for original in originals}
    options: dict[str, Any] = {"mesh": mesh.data, "mp_policy": sharding.precision, "offload_policy": sharding.offload}
    replicated = set(plan.replicated.values())
    ignored = replicated | set(plan.ties)
    if plan.ties:
        # Tied parameters are registered on the root. `fully_shard` then finds all modules that share a tied parameter.
        root.ties = nn.ParameterList(plan.ties)
    for unit in plan.units:
        broadcast_from_rank_0(unit.parameters, sharding.device, mesh.data_group)
        if unit is plan.root:
            fully_shard(root, ignored_params=replicated, **options)
        else:
            fully_shard(
                unit.module, ignored_params=ignored, reshard_after_forward=sharding.reshard_after_forward, **options
            )
        _release(unit, originals_by_id)
    sharded = cast(FSDPModule, root)
    if sharding.device.type == "cpu":
        for child in root.modules():
            if isinstance(child, FSDPModule):
                child.set_force_sum_reduction_for_comms(True)  # gloo does not support ReduceOp.PREMUL_SUM
    return sharded


def _release(unit: Unit, originals: Mapping[int, Original]) -> None:
    for parameter in unit.parameters:
        forget_original(parameter)
        originals[id(parameter)].free_storage()


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
