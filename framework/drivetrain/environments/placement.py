"""Placement: which process of a run this is, on which node, and where the processes meet."""

from __future__ import annotations

from dataclasses import dataclass, replace

from drivetrain.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one process among all processes of a run.

    Attributes:
        rank: the global rank.
        world_size: the number of processes.
        local_rank: the rank on this node.
        local_world_size: the number of processes on this node.
        node_rank: the rank of this node.
        num_nodes: the number of nodes.
        address: the host of the store where all processes meet.
        port: the port of the store; 0 before the system has chosen a port.
        job: the name of the job, equal for all its processes; None for a job without a name. The store refuses
            processes of other jobs.

    Raises:
        ConfigurationError: the numbers contradict each other.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    job: str | None = None

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

    @classmethod
    def on_one_node(cls, rank: int, world_size: int) -> Placement:
        """Return the placement of a process whose run has a single node."""
        return cls(rank, world_size, rank, world_size)

    @classmethod
    def of_unknown_node(cls, rank: int, world_size: int, local_rank: int, local_world_size: int) -> Placement:
        """Return the placement of a process whose launcher, like MPI or LSF, does not provide the node rank.

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
        return cls(rank, world_size, local_rank, local_world_size, node_rank, num_nodes)

    def neighbour(self, local_rank: int) -> Placement:
        """Return the placement of the process with ``local_rank`` on this node."""
        return replace(self, rank=self.rank - self.local_rank + local_rank, local_rank=local_rank)
