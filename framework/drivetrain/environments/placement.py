"""Placement: where one process stands among all of a run."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Placement:
    """Who this process is among how many.

    Attributes:
        rank: among all processes.
        world_size: the number of all processes.
        local_rank: among those of this node.
        local_world_size: the number of those of this node.
        node_rank: this node among all nodes.
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
                    "a rank is counted from 0 and lies below its count, and no count exceeds the whole",
                    "check how the processes were started and the variables that their launcher set",
                )
