"""Applies a plan: what is checkpointed, compiled and sharded, in this order, and what is gathered ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from drivetrain_strategies._activation_checkpointing import ForwardSwap, modules_of
from drivetrain_strategies._half_norms import norms_of, with_float32_weights
from drivetrain_strategies._step_module import StepModule
from drivetrain_strategies.fsdp._broadcast_init import start_alike
from drivetrain_strategies.fsdp._device_mesh import Mesh
from drivetrain_strategies.fsdp._internals import forget_original
from drivetrain_strategies.fsdp._original_parameters import Original
from drivetrain_strategies.fsdp._plan import Plan, Unit


@dataclass(frozen=True, slots=True)
class Sharding:
    """How units are sharded.

    Attributes:
        reshard_after_forward: as `fully_shard` takes it, for the units; the root stays gathered until its backward.
        precision: what is gathered and reduced.
        offload: where shards live.
        device: what the rank computes on.
    """

    reshard_after_forward: bool | int | None
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
    """Activation checkpointing first, compilation around it; sharding comes around both, as hooks.

    Norms whose weights are gathered in half precision compute in float32 where their kernels ask for it.

    Args:
        module: the bare module.
        plan: whose units are compiled.
        classes: of modules to checkpoint; None for none.
        checkpointing: wraps a forward.
        compile_options: for `torch.compile`; None compiles nothing.
        gathered_in_half: whether weights are, that are kept in float32.
    """
    swap = ForwardSwap()
    if gathered_in_half:
        for norm in norms_of(module):
            swap.put(norm, partial(with_float32_weights, norm))
    if classes is not None:
        for block in modules_of(module, classes):
            swap.put(block, checkpointing)
    if compile_options is not None:
        for unit in plan.units[:-1]:
            swap.put(unit.module, lambda forward: torch.compile(forward, **compile_options))
    return swap


def shard(root: StepModule, plan: Plan, mesh: Mesh, how: Sharding, originals: Sequence[Original]) -> FSDPModule:
    """Shard units from within outwards, and ``root`` around them; each whole parameter's storage is let go at once.

    Every rank starts from rank 0's values. Collective.
    """
    by_id = {id(original.parameter): original for original in originals}
    options: dict[str, Any] = {"mesh": mesh.data, "mp_policy": how.precision, "offload_policy": how.offload}
    whole = set(plan.whole.values())
    apart = whole | set(plan.ties)
    if plan.ties:
        # Theirs is the root's group, which finds them in all their places.
        root.ties = nn.ParameterList(plan.ties)
    for unit in plan.units:
        start_alike(unit.parameters, how.device, mesh.data_group)
        if unit is plan.root:
            fully_shard(root, ignored_params=whole, **options)
        else:
            fully_shard(unit.module, ignored_params=apart, reshard_after_forward=how.reshard_after_forward, **options)
        _release(unit, by_id)
    sharded = cast(FSDPModule, root)
    if how.device.type == "cpu":
        for child in root.modules():
            if isinstance(child, FSDPModule):
                child.set_force_sum_reduction_for_comms(True)  # gloo knows no premultiplied sum
    return sharded


def _release(unit: Unit, originals: Mapping[int, Original]) -> None:
    for parameter in unit.parameters:
        forget_original(parameter)
        originals[id(parameter)].release()


def gather_ahead(plan: Plan, forward: int, backward: int) -> None:
    """Let every unit start gathering the next ones, in the order in which they stand in the module; 0 leaves it be."""
    modules = [cast(FSDPModule, unit.module) for unit in plan.in_order()]
    for depth, ordered, method in (
        (forward, modules, FSDPModule.set_modules_to_forward_prefetch),
        (backward, modules[::-1], FSDPModule.set_modules_to_backward_prefetch),
    ):
        for position, module in enumerate(ordered):
            ahead = ordered[position + 1 : position + 1 + depth]
            if ahead:
                method(module, ahead)
