"""Reads a sharded module's state as shards, and loads shards or whole tensors. Names are those of the user's module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from drivetrain.strategies import Box, ParameterShard, Region
from drivetrain_strategies.fsdp._internals import local_region


def sharded_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name. Sharded values are DTensors. Tied names share one object."""
    values: dict[int, torch.Tensor] = {}
    return {
        name: values.setdefault(id(value), value.detach()) if isinstance(value, torch.Tensor) else value
        for name, value in module.state_dict(keep_vars=True).items()
    }


class _MeshFacts:
    """What a save asks a mesh about each of thousands of tensors, where each answer takes torch a while."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.has_rank_0 = 0 in mesh.mesh
        self.regions: dict[Any, Box] = {}


_FACTS: WeakKeyDictionary[DeviceMesh, _MeshFacts] = WeakKeyDictionary()


def _facts(mesh: DeviceMesh) -> _MeshFacts:
    if mesh not in _FACTS:
        _FACTS[mesh] = _MeshFacts(mesh)
    return _FACTS[mesh]


def region_of(tensor: DTensor) -> Box:
    """Return the region of ``tensor`` that this rank holds."""
    mesh = tensor.device_mesh
    regions, key = _facts(mesh).regions, (tuple(mesh.get_coordinate() or ()), tensor.placements, tensor.shape)
    if key not in regions:
        regions[key] = Box(*local_region(tensor))
    return regions[key]


def shard_of(value: Any) -> Any:
    """Return a DTensor as the `ParameterShard` that this rank holds. Other values are returned unchanged."""
    if not isinstance(value, DTensor):
        return value
    mesh = value.device_mesh
    # Under tensor parallelism, a parameter that is not split has the same shards on several meshes. Checkpoints contain
    # only the primary shards, which are those on the mesh that contains rank 0.
    is_primary = _facts(mesh).has_rank_0 and all(
        mesh.get_local_rank(dimension) == 0
        for dimension, placement in enumerate(value.placements)
        if placement.is_replicate()
    )
    return ParameterShard(value.to_local(), tuple(value.shape), region_of(value), is_primary, value.full_tensor)


def regions_of(module: nn.Module) -> dict[str, Region]:
    """Return the regions of the sharded tensors in ``module``'s state, by name."""
    state = module.state_dict(keep_vars=True)
    return {name: region_of(value) for name, value in state.items() if isinstance(value, DTensor)}


def in_layout_of(value: torch.Tensor | ParameterShard, target: torch.Tensor) -> torch.Tensor:
    """Return ``value`` in the layout of ``target``.

    A value sharded in another layout is gathered first, which is collective. A whole tensor, or a `ParameterShard` of
    this rank's region, needs no communication.
    """
    if isinstance(value, ParameterShard):
        if isinstance(target, DTensor) and value.region == region_of(target):
            mesh, placements = target.device_mesh, target.placements
            local = value.local.to(target.to_local().device)
            shape, stride = target.size(), target.stride()
            return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        value = value.full_tensor()
    if not isinstance(target, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor):
        if value.device_mesh == target.device_mesh and value.placements == target.placements:
            return value
        value = value.full_tensor()
    mesh = target.device_mesh
    if mesh.device_type != value.device.type:
        value = value.to(mesh.device_type)
    return distribute_tensor(value, mesh, target.placements, src_data_rank=None)


@torch.no_grad()
def write_value(target: torch.Tensor, value: torch.Tensor | ParameterShard) -> None:
    """Write ``value`` into ``target``. Either may be whole or sharded; see `in_layout_of` for what communicates."""
    part = in_layout_of(value, target)
    _local(target).copy_(_local(part))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_optimizer_state(saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return optimizer state by parameter names. Tensors with their parameter's shape get the parameter's layout."""
    state: dict[str, Any] = {}
    for name, values in saved["state"].items():
        state[name] = state_in_layout_of(parameters[name], values) if name in parameters else values
    return {**saved, "state": state}


def state_in_layout_of(target: torch.Tensor, values: Any) -> Any:
    """Return a parameter's optimizer state. Tensors with the parameter's shape get its layout."""
    return map_tensors(values, partial(_in_layout_if_shaped_like, target))


def _in_layout_if_shaped_like(target: torch.Tensor, value: torch.Tensor | ParameterShard) -> Any:
    is_shaped_alike = len(value.shape) > 0 and tuple(value.shape) == tuple(target.shape)
    can_be_cut = isinstance(value, ParameterShard | DTensor) or type(value) is torch.Tensor  # quantised state cannot
    return in_layout_of(value, target) if is_shaped_alike and can_be_cut else value


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``change`` applied to its tensors and shards, also in dicts, lists and tuples.

    A container in which nothing changed is returned itself.
    """
    if isinstance(value, torch.Tensor | ParameterShard):
        return change(value)
    if isinstance(value, dict):
        changed = {key: map_tensors(part, change) for key, part in value.items()}
        return value if all(changed[key] is value[key] for key in value) else changed
    if isinstance(value, list | tuple):
        parts = [map_tensors(part, change) for part in value]
        return value if all(map(is_, parts, value)) else type(value)(parts)
    return value
