"""Kubeflow's PyTorchJob, which starts one process per pod."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from drivetrain.environments.environment import Environment
from drivetrain.environments.placement import Placement

_REQUIRED_VARIABLES = ("KUBERNETES_PORT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_TORCHRUN_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


class KubeflowEnvironment(Environment):
    """Pods of a PyTorchJob that run the script directly. Pods that run torchrun count as `TorchrunEnvironment`."""

    name: ClassVar[str] = "kubeflow"

    @classmethod
    def detect(cls, variables: Mapping[str, str]) -> bool:
        """Return True if the variables of the PyTorchJob are set, and the variables that only torchrun sets are not."""
        return all(variables.get(name) for name in _REQUIRED_VARIABLES) and not any(
            name in variables for name in _TORCHRUN_VARIABLES
        )

    def placement(self) -> Placement:
        """Return the placement of this pod, which counts as a node with one process."""
        rank, world_size = self.variables.integer("RANK"), self.variables.integer("WORLD_SIZE")
        return Placement(rank=rank, world_size=world_size, node_rank=rank, num_nodes=world_size)
