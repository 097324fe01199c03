"""Reads and writes a sharded module's state by plain names: it returns shards, and loads shards or whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from drivetrain.strategies import Box, ParameterShard, Region, WeightMismatch
from drivetrain_strategies.fsdp._internals import local_region


def sharded_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name; tied names share one object, sharded ones are DTensors."""
    detached: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):  # an _extra_state
            state[name] = value
            continue
        if id(value) not in detached:
            detached[id(value)] = value.detach()
        state[name] = detached[id(value)]
    return state


def region_of(place: DTensor) -> Box:
    """Return the region of the DTensor ``place`` that this rank holds."""
    return Box(*local_region(place))


def shard_of(value: Any) -> Any:
    """Return a DTensor as the `ParameterShard` that this rank holds; other values unchanged."""
    if not isinstance(value, DTensor):
        return value
    mesh = value.device_mesh
    # A parameter that tensor parallelism does not split is sharded equally over several meshes; rank 0's is primary.
    is_primary = 0 in mesh.mesh and all(
        mesh.get_local_rank(dimension) == 0
        for dimension, placement in enumerate(value.placements)
        if placement.is_replicate()
    )
    return ParameterShard(value.to_local(), tuple(value.shape), region_of(value), is_primary, value.full_tensor)


def regions_of(module: nn.Module) -> dict[str, Region]:
    """Return the regions of the sharded tensors in ``module``'s state, by name."""
    state = module.state_dict(keep_vars=True)
    return {name: region_of(place) for name, place in state.items() if isinstance(place, DTensor)}


def like(value: torch.Tensor | ParameterShard, place: torch.Tensor) -> torch.Tensor:
    """Return ``value`` in the layout of ``place``.

    A whole tensor, or a `ParameterShard` of this rank's region, needs no communication. A value sharded in another
    layout is gathered first, which is collective.
    """
    if isinstance(value, ParameterShard):
        if isinstance(place, DTensor) and value.region == region_of(place):
            mesh, placements = place.device_mesh, place.placements
            local = value.local.to(place.to_local().device)
            shape, stride = place.size(), place.stride()
            return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        value = value.full_tensor()
    if not isinstance(place, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor):
        if value.device_mesh == place.device_mesh and value.placements == place.placements:
            return value
        value = value.full_tensor()
    mesh = place.device_mesh
    if mesh.device_type != value.device.type:
        value = value.to(mesh.device_type)
    return distribute_tensor(value, mesh, place.placements, src_data_rank=None)


@torch.no_grad()
def load_state(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load parameters and buffers by name into a sharded module.

    Raises:
        CheckpointError: names or shapes do not match and ``strict`` is set; nothing is loaded then.
    """
    own = module.state_dict(keep_vars=True)
    WeightMismatch.compare(own, state, partial=not strict).raise_or_warn("The weights", type(module).__name__, strict)
    extra = {}
    for name, place in own.items():
        if name not in state:
            continue
        if not isinstance(place, torch.Tensor):
            extra[name] = state[name]
            continue
        value = like(state[name], place)
        if isinstance(place, DTensor):
            assert isinstance(value, DTensor)
            place.to_local().copy_(value.to_local())
        else:
            place.copy_(value.detach())
    if extra:
        module.load_state_dict(extra, strict=False)


def sharded_optimizer_state(saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return named optimizer state; tensors with their parameter's shape get the parameter's layout."""
    state: dict[str, Any] = {}
    for name, values in saved["state"].items():
        place = parameters.get(name)
        state[name] = {
            key: like(value, place) if place is not None and _is_shaped_like(value, place) else value
            for key, value in values.items()
        }
    return {"state": state, "param_groups": saved["param_groups"]}


def _is_shaped_like(value: Any, place: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor | ParameterShard)
        and len(value.shape) > 0
        and tuple(value.shape) == tuple(place.shape)
    )
