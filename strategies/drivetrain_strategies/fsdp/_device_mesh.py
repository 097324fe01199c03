"""Arranges the ranks of a sharded run in a mesh: for sharding, replication and tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.strategies import broadcast_together, set_timeout
from drivetrain_strategies.fsdp._internals import release_process_groups


def mesh_sizes(
    placement: Placement, sharding: str, replicate_size: int | None, shard_size: int | None, tensor_parallel: int
) -> dict[str, int]:
    """Return the sizes of the run's mesh by dimension. Their product is the number of ranks.

    The dimensions are "replicate" for copies of the sharded parameters and "shard" for the ranks of a copy (hybrid), or
    "data", and "tensor" if layers are split. With ``sharding="hybrid"`` and no sizes, each node holds one copy.

    Raises:
        ConfigurationError: the product of the sizes is not the world size.
    """
    world = placement.world_size
    data = world // tensor_parallel
    sizes = {"data": shard_size or data}
    if sharding == "hybrid":
        local = placement.local_world_size // tensor_parallel
        if shard_size is None and replicate_size is None and local and data % local == 0:
            shard_size = local
        shard = shard_size or data // (replicate_size or 1)
        sizes = {"replicate": replicate_size or data // shard, "shard": shard}
    if tensor_parallel > 1:
        sizes["tensor"] = tensor_parallel
    if prod(sizes.values()) != world:
        product = " x ".join(f"{size} ({name})" for name, size in sizes.items())
        raise ConfigurationError(
            f"FSDPStrategy(sharding={sharding!r}) cannot arrange {world} ranks as {product}.",
            "each rank holds one shard of one copy, and 'hybrid' alone keeps several copies.",
            f"choose sizes whose product is {world}, or leave them out.",
        )
    return sizes


class Mesh:
    """Where a run shards its parameters, and which ranks read different data.

    Args:
        whole: the mesh of the run.
        data: the dimensions of ``whole`` over which parameters are divided: one for shards, before it one for copies.
        data_group: the ranks of ``data``, which read different data.
        common_group: the ranks whose unsplit parameters and buffers are equal; None stands for all ranks.
        device: the device that this rank computes on.

    Attributes:
        is_part_of_world: whether there are ranks outside of ``data``.
    """

    def __init__(
        self, whole: DeviceMesh, data: DeviceMesh, data_group: Any, common_group: Any, device: torch.device
    ) -> None:
        self.whole = whole
        self.data = data
        self.data_group = data_group
        self.common_group = common_group
        self.is_part_of_world = data.size() < dist.get_world_size()
        self._device = device
        self._own_groups: list[Any] | None = None

    @classmethod
    def of_sizes(cls, sizes: dict[str, int], device: torch.device, timeout: timedelta) -> Mesh:
        """Create a mesh of all ranks, and process groups with this timeout, until `close`. Collective.

        Args:
            sizes: see `mesh_sizes`.
            device: the device that this rank computes on.
            timeout: the timeout of the groups.
        """
        whole = data = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        data_group = dist.group.WORLD
        if "tensor" in sizes:
            data = whole[tuple(name for name in sizes if name != "tensor")]
            data_group = (data._flatten("data") if data.ndim > 1 else data).get_group()
        mesh = cls(whole, data, data_group, None, device)
        groups = {id(group): group for group in [*whole.get_all_groups(), data_group]}
        mesh._own_groups = [group for group in groups.values() if group is not dist.group.WORLD]
        set_timeout(timeout, mesh._own_groups)
        return mesh

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move tensors to this rank's device and broadcast the first rank's values. Collective; packs by dtype.

        Meta tensors are skipped. Of a DTensor (tensor parallelism), the local part is broadcast over the data ranks.
        """
        whole: list[torch.Tensor] = []
        split: list[torch.Tensor] = []
        for tensor in tensors:
            if tensor.is_meta:
                continue
            if isinstance(tensor, DTensor):
                split.append(tensor.to_local())
                continue
            if tensor.device != self._device:
                tensor.data = tensor.data.to(self._device)
            whole.append(tensor.data)
        broadcast_together(whole, self.common_group)
        broadcast_together(split, self.data_group)

    def close(self) -> None:
        """Destroy the groups that were created for the run. Other groups, and a mesh of somebody else, stay open."""
        if self._own_groups is not None:
            for group in self._own_groups:
                dist.destroy_process_group(group)
            release_process_groups(self.whole)
        self.data_group = self.common_group = None
