"""Placement: the rank of a process and the number of processes, globally and on its node."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Placement:
    """The rank of one process among all processes of a run.

    Attributes:
        rank: the global rank.
        world_size: the number of processes.
        local_rank: the rank on this node.
        local_world_size: the number of processes on this node.
        node_rank: the rank of this node.
        num_nodes: the number of nodes.

    Raises:
        ConfigurationError: the numbers contradict each other.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1

    def __post_init__(self) -> None:
        for name, value, bound_name, bound in (
            ("rank", self.rank, "world_size", self.world_size),
            ("local_rank", self.local_rank, "local_world_size", self.local_world_size),
            ("node_rank", self.node_rank, "num_nodes", self.num_nodes),
            ("local_world_size", self.local_world_size - 1, "world_size", self.world_size),
            ("num_nodes", self.num_nodes - 1, "world_size", self.world_size),
        ):
            if not 0 <= value < bound:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)} and {bound_name}={bound} contradict each other",
                    "ranks run from 0 to their count minus 1, and no count exceeds the world size",
                    "check how the processes were started and the variables that their launcher set",
                )
