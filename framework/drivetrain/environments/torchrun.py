"""torchrun's variables, which other launchers set too: how a process reads them, and how launchers set them."""

from __future__ import annotations

from typing import ClassVar

from drivetrain.environments.environment import Environment
from drivetrain.environments.placement import Placement


class TorchrunEnvironment(Environment):
    """Processes that `torchrun` started, or that have ``RANK`` and ``WORLD_SIZE`` set as torchrun does.

    ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` are required too, because they select the device of each process.
    """

    name: ClassVar[str] = "torchrun"

    def placement(self) -> Placement:
        """Return the placement from torchrun's variables."""
        variables = self.variables
        rank, world_size = variables.integer("RANK"), variables.integer("WORLD_SIZE")
        if world_size == 1:
            return Placement(rank=rank)
        local_world_size = variables.integer("LOCAL_WORLD_SIZE")
        num_nodes = variables.integer_or(max(1, world_size // max(1, local_world_size)), "GROUP_WORLD_SIZE")
        return Placement(
            rank=rank,
            world_size=world_size,
            local_rank=variables.integer("LOCAL_RANK"),
            local_world_size=local_world_size,
            node_rank=variables.integer_or(rank // max(1, local_world_size), "GROUP_RANK"),
            num_nodes=num_nodes,
        )

    @property
    def agent_hosts_store(self) -> bool:
        """Whether torchrun's agent hosts the store."""
        return self.variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True"


class KubeflowEnvironment(Environment):
    """Pods of Kubeflow's PyTorchJob that run the script. Pods that run torchrun are a `TorchrunEnvironment`."""

    name: ClassVar[str] = "kubeflow"

    def placement(self) -> Placement:
        """Return the placement of this pod, which counts as a node with one process."""
        rank, world_size = self.variables.integer("RANK"), self.variables.integer("WORLD_SIZE")
        return Placement(rank=rank, world_size=world_size, node_rank=rank, num_nodes=world_size)


def torchrun_variables(placement: Placement) -> dict[str, str]:
    """Return the variables that torchrun would set for the process at ``placement``. Most libraries read them."""
    return {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "GROUP_RANK": str(placement.node_rank),
        "GROUP_WORLD_SIZE": str(placement.num_nodes),
        "ROLE_RANK": str(placement.rank),
        "ROLE_WORLD_SIZE": str(placement.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": placement.address,
        "MASTER_PORT": str(placement.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": placement.job or "none",
    }
