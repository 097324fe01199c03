"""Which node a process is on, from the counts that MPI and LSF give."""

from __future__ import annotations

from drivetrain.environments.placement import Placement
from drivetrain.errors import ConfigurationError


def place(rank: int, world_size: int, local_rank: int, local_world_size: int) -> Placement:
    """Return the placement of a process whose launcher does not tell the node.

    Ranks are dealt to nodes in blocks or in turn, and which it was follows from the local rank.

    Raises:
        ConfigurationError: the numbers fit neither, as with different numbers of processes on different nodes.
    """
    num_nodes, rest = divmod(world_size, local_world_size) if local_world_size else (0, 1)
    if rest == 0 and rank % local_world_size == local_rank:
        node_rank = rank // local_world_size
    elif rest == 0 and rank // num_nodes == local_rank:
        node_rank = rank % num_nodes
    else:
        raise ConfigurationError(
            f"rank {rank} of {world_size} is number {local_rank} of {local_world_size} on its node",
            "with as many processes on every node, in blocks or in turn, that cannot be, and its node is unknown",
            "start equally many processes on every node, or start them with torchrun, which tells",
        )
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
    )
