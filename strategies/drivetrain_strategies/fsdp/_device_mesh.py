"""How the ranks of a sharded run are laid out: over which they shard, replicate, and split single layers."""

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
from drivetrain_strategies.fsdp._internals import let_go


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of a mesh; their product is the world's.

    Attributes:
        replicate: copies of the sharded whole.
        shard: over how many ranks one copy's parameters are spread.
        tensor: over how many ranks single layers are split (tensor parallelism).
        hybrid: whether copies are a dimension of the mesh, be it of size 1.
    """

    replicate: int
    shard: int
    tensor: int
    hybrid: bool

    @property
    def data(self) -> int:
        """Among how many ranks the data is dealt."""
        return self.replicate * self.shard


def find_layout(
    placement: Placement, sharding: str, replicate_size: int | None, shard_size: int | None, tensor_parallel: int
) -> Layout:
    """Find the sizes for the ranks that are there.

    Where a hybrid's are not given, a copy is spread over the ranks of one node, and every node has one.

    Raises:
        ConfigurationError: they do not multiply to the world's size.
    """
    world = placement.world_size
    if world % tensor_parallel:
        raise ConfigurationError(
            f"tensor_parallel={tensor_parallel} on {world} ranks.",
            "every group of tensor-parallel ranks is of that size.",
            f"use a divisor of {world}.",
        )
    data = world // tensor_parallel
    for label, size in (("shard_size", shard_size), ("replicate_size", replicate_size)):
        if size is not None and size > data:
            raise ConfigurationError(
                f"{label}={size}, and there are {data} ranks to spread over.",
                "a rank holds one part of one copy.",
                f"use at most {data}, or start more processes.",
            )
    if sharding != "hybrid":
        if shard_size not in (None, data):
            raise ConfigurationError(
                f"shard_size={shard_size} with sharding={sharding!r} on {data} ranks.",
                "that sharding spreads one copy over all of them.",
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
            f"replicate_size={replicate} x shard_size={shard} = {replicate * shard}, and there are {data} ranks.",
            "every rank holds one part of one copy.",
            f"choose two numbers whose product is {data}, or leave one of them out.",
        )
    return Layout(replicate, shard, tensor_parallel, True)


class Mesh:
    """The `DeviceMesh` of a run, by what its dimensions are for.

    Args:
        layout: the sizes.
        device: what the ranks compute on.
        timeout: after which a collective of a group that is made for the run fails; torch gives those its own.

    Attributes:
        whole: with the dimensions "replicate" and "shard" (hybrid), or "data"; and "tensor" where layers are split.
        data: without "tensor": one dimension, or two for a hybrid.
    """

    def __init__(self, layout: Layout, device: torch.device, timeout: timedelta) -> None:
        sizes = {"replicate": layout.replicate, "shard": layout.shard} if layout.hybrid else {"data": layout.shard}
        data_names = tuple(sizes)
        if layout.tensor > 1:
            sizes["tensor"] = layout.tensor
        self.layout = layout
        self.whole: DeviceMesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.data: DeviceMesh = self.whole if layout.tensor == 1 else self.whole[data_names]
        # Everything that a step reduces by hand goes over the ranks that hold other data.
        self.data_group: Any = dist.group.WORLD if layout.tensor == 1 else self._flat().get_group()
        self._others: list[Any] = []
        self._timeout = timeout
        set_timeout(timeout, self._own_groups())

    def _flat(self) -> DeviceMesh:
        return self.data._flatten("data") if self.data.ndim > 1 else self.data

    @property
    def data_rank(self) -> int:
        """Which share of the data this rank reads."""
        return int(dist.get_rank(self.data_group))

    @property
    def tensor_rank(self) -> int:
        """This rank's place among those that read the same data."""
        return 0 if self.layout.tensor == 1 else int(self.whole.get_local_rank("tensor"))

    def also(self, mesh: DeviceMesh) -> None:
        """Take care of a further mesh that was made for the run."""
        self._others.append(mesh)
        set_timeout(self._timeout, self._own_groups())

    def close(self) -> None:
        """Destroy the groups that were made for the run; the default one is not ours to destroy here."""
        for group in self._own_groups():
            dist.destroy_process_group(group)
        for mesh in (self.whole, *self._others):
            let_go(mesh)
        self.data_group = None

    def _own_groups(self) -> list[Any]:
        groups = [group for mesh in (self.whole, *self._others) for group in mesh.get_all_groups()]
        found = {id(group): group for group in [*groups, self.data_group]}
        return [group for group in found.values() if group is not dist.group.WORLD and group is not None]


def require_mesh(mesh: Mesh | None) -> Mesh:
    """Return the mesh of the run.

    Raises:
        ConfigurationError: there is none, since nobody made or joined a process group.
    """
    if mesh is None:
        raise ConfigurationError(
            "FSDPStrategy.setup_module without a process group.",
            "shards travel over it.",
            "let Fit drive the strategy, or call bind and setup_environment before.",
        )
    return mesh
