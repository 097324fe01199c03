"""The environment of a process that the user started, as the only process of a run or as the first of a node."""

from __future__ import annotations

from typing import ClassVar

from drivetrain.environments.environment import Environment, Placement
from drivetrain.errors import ConfigurationError


class PlainEnvironment(Environment):
    """A process that the user started.

    On several nodes the user starts the script once per node, with the variables ``MASTER_ADDR`` (the first node),
    ``MASTER_PORT`` (a free port on the first node) and ``NODE_RANK``. The process then starts the other processes of
    its node.
    """

    name: ClassVar[str] = "plain"
    started_processes: ClassVar[bool] = False

    def placement(self) -> Placement:
        """Return the placement of a single process. For several processes there is `first_placement_on_node`."""
        return Placement()

    def first_placement_on_node(self, num_nodes: int, local_world_size: int) -> Placement:
        """Return the placement of this process as the first process on its node.

        Raises:
            ConfigurationError: on several nodes, a variable is missing or contradicts ``num_nodes``.
        """
        if num_nodes == 1:
            return Placement(world_size=local_world_size, local_world_size=local_world_size)
        for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
            if self.variables.text(name) is None:
                raise ConfigurationError(
                    f"num_nodes={num_nodes}, but {name} is not set",
                    "on several nodes each process needs the rendezvous address and its node rank",
                    "set MASTER_ADDR, MASTER_PORT and NODE_RANK on every node, or use torchrun or srun",
                )
        node_rank = self.variables.integer("NODE_RANK")
        return Placement(
            rank=node_rank * local_world_size,
            world_size=num_nodes * local_world_size,
            local_world_size=local_world_size,
            node_rank=node_rank,
            num_nodes=num_nodes,
        )
