"""Infers the node rank of a process, which MPI and LSF do not provide."""

from __future__ import annotations

from drivetrain.environments.placement import Placement
from drivetrain.errors import ConfigurationError


def infer_placement(rank: int, world_size: int, local_rank: int, local_world_size: int) -> Placement:
    """Return the placement of a process whose launcher does not provide the node rank.

    Launchers assign ranks to nodes in blocks or round-robin. The local rank shows which of the two orders was used.

    Raises:
        ConfigurationError: the numbers fit neither order, for example because nodes have different numbers of
            processes.
    """
    num_nodes, rest = divmod(world_size, local_world_size) if local_world_size else (0, 1)
    if rest == 0 and rank % local_world_size == local_rank:
        node_rank = rank // local_world_size
    elif rest == 0 and rank // num_nodes == local_rank:
        node_rank = rank % num_nodes
    else:
        raise ConfigurationError(
            f"rank {rank} of {world_size} is number {local_rank} of {local_world_size} on its node",
            "with the same number of processes per node, neither block nor round-robin order gives these "
            "numbers, so the node is unknown",
            "start the same number of processes on every node, or use torchrun, which sets the node rank",
        )
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
    )
