"""Arranges the ranks of a sharded run in a mesh: for sharding, replication and tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import set_timeout
from drivetrain_strategies.fsdp._internals import release_process_groups


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of a mesh. Their product ``replicate * shard * tensor`` is the world size.

    Attributes:
        replicate: number of copies of the sharded parameters.
        shard: number of ranks over which one copy is sharded.
        tensor: number of ranks over which single layers are split (tensor parallelism).
        hybrid: whether the mesh has a dimension for copies, even of size 1.
    """

    replicate: int
    shard: int
    tensor: int
    hybrid: bool


def resolve_layout(
    placement: Placement, sharding: str, replicate_size: int | None, shard_size: int | None, tensor_parallel: int
) -> Layout:
    """Return the mesh sizes for ``placement``.

    With ``sharding="hybrid"`` and no sizes, each node holds one copy, sharded over the node's ranks.

    Raises:
        ConfigurationError: the product of the sizes is not the world size.
    """
    world = placement.world_size
    if world % tensor_parallel:
        raise ConfigurationError(
            f"tensor_parallel={tensor_parallel} on {world} ranks.",
            "the ranks are divided into tensor-parallel groups of that size.",
            f"use a divisor of {world}.",
        )
    data = world // tensor_parallel
    for label, size in (("shard_size", shard_size), ("replicate_size", replicate_size)):
        if size is not None and size > data:
            raise ConfigurationError(
                f"{label}={size}, but there are only {data} ranks to shard over.",
                "each rank holds one shard of one copy.",
                f"use at most {data}, or start more processes.",
            )
    if sharding != "hybrid":
        if shard_size not in (None, data):
            raise ConfigurationError(
                f"shard_size={shard_size} with sharding={sharding!r} on {data} ranks.",
                f"{sharding!r} shards one copy over all ranks.",
                "use sharding='hybrid', or leave shard_size out.",
            )
        return Layout(1, data, tensor_parallel, False)
    if shard_size is None and replicate_size is None:
        local = placement.local_world_size // tensor_parallel
        shard_size = local if local and data % local == 0 else data
    shard = shard_size if shard_size is not None else data // (replicate_size or 1)
    replicate = replicate_size if replicate_size is not None else data // shard
    if replicate * shard != data:
        raise ConfigurationError(
            f"replicate_size={replicate} x shard_size={shard} = {replicate * shard}, but there are {data} ranks.",
            "each rank holds one shard of one copy.",
            f"choose two numbers whose product is {data}, or leave one of them out.",
        )
    return Layout(replicate, shard, tensor_parallel, True)


class Mesh:
    """The `DeviceMesh` of a run and the process groups created for the mesh.

    Args:
        layout: the sizes of the mesh.
        device: the device that this rank computes on.
        timeout: timeout of the groups created for the run, which replaces torch's default.

    Attributes:
        whole: the mesh with dimensions "replicate" and "shard" (hybrid) or "data", and "tensor" if layers are split.
        data: the mesh without the dimension "tensor". The mesh has two dimensions if hybrid, and otherwise one.
    """

    def __init__(self, layout: Layout, device: torch.device, timeout: timedelta) -> None:
        sizes = {"replicate": layout.replicate, "shard": layout.shard} if layout.hybrid else {"data": layout.shard}
        data_names = tuple(sizes)
        if layout.tensor > 1:
            sizes["tensor"] = layout.tensor
        self.layout = layout
        self.whole: DeviceMesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.data: DeviceMesh = self.whole if layout.tensor == 1 else self.whole[data_names]
        # Reductions outside `fully_shard` run over the ranks with distinct data.
        self.data_group: Any = dist.group.WORLD if layout.tensor == 1 else self._flat().get_group()
        set_timeout(timeout, self._own_groups())

    def _flat(self) -> DeviceMesh:
        return self.data._flatten("data") if self.data.ndim > 1 else self.data

    def close(self) -> None:
        """Destroy the groups that were created for the run. The default group stays open."""
        for group in self._own_groups():
            dist.destroy_process_group(group)
        release_process_groups(self.whole)
        self.data_group = None

    def _own_groups(self) -> list[Any]:
        groups_by_id = {id(group): group for group in [*self.whole.get_all_groups(), self.data_group]}
        return [group for group in groups_by_id.values() if group is not dist.group.WORLD and group is not None]
