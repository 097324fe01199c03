"""Environment: the interface through which a process learns its rank, the world size and the rendezvous address."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from drivetrain.environments._variables import Variables
from drivetrain.environments.placement import Placement
from drivetrain.errors import ConfigurationError


class Environment(ABC):
    """Reads rank, world size and rendezvous address from the variables of a launcher or cluster.

    A subclass implements `placement`. By default, `main_address` is ``MASTER_ADDR``, or this machine if the variable is
    not set, `main_port` is ``MASTER_PORT``, `agent_hosts_store` is False, and `restart_count` is 0 unless torchrun sets
    the count. If drivetrain has to start the processes, a subclass sets `started_processes` to False and may implement
    `first_placement_on_node`. The constructor copies the variables, and all members read only this copy, so that an
    environment can be tested without the cluster.

    Pass an environment to ``Fit(environment=...)``. Alternatively, register a callable without arguments that returns
    an environment in the entry-point group ``drivetrain.environments``, and pass the name of the entry point.

    Args:
        variables: the variables to read instead of ``os.environ``.
    """

    name: ClassVar[str] = ""
    """The name for ``Fit(environment=...)`` and for errors. The default is the name of the class."""

    started_processes: ClassVar[bool] = True
    """Whether the launcher or cluster has started the processes, so that drivetrain starts none."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = cls.name or cls.__name__

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self.variables = Variables(os.environ if variables is None else variables, self.name)

    @abstractmethod
    def placement(self) -> Placement:
        """Return the rank of this process and the number of processes.

        Raises:
            ConfigurationError: a variable is missing, is not a number or contradicts another variable. The message
                names the variable.
        """

    def first_placement_on_node(self, num_nodes: int, local_world_size: int) -> Placement:
        """Return the placement of this process as the first process on its node.

        drivetrain starts the other processes of the node. This method is called instead of `placement` if
        `started_processes` is False and the run needs several processes.

        Args:
            num_nodes: the number of nodes of the run.
            local_world_size: the number of processes on each node.

        Raises:
            ConfigurationError: there are several nodes, and this environment does not know the node of this process.
        """
        if num_nodes > 1:
            raise ConfigurationError(
                f"num_nodes={num_nodes} with environment={self.name!r}",
                "this environment does not know which node this process is on",
                f"implement {type(self).__name__}.first_placement_on_node, or let the cluster start every process",
            )
        return Placement(world_size=local_world_size, local_world_size=local_world_size)

    @classmethod
    def detect(cls, variables: Mapping[str, str]) -> bool:
        """Return True if ``variables`` are the variables of a process in this environment.

        ``Fit(environment="auto")`` calls this method on the built-in environments only. Other environments have to be
        chosen by name.
        """
        return False

    @property
    def main_address(self) -> str:
        """The host of rank 0, where the processes meet for rendezvous."""
        return self.variables.text("MASTER_ADDR") or self._default_address()

    @property
    def main_port(self) -> int:
        """The port on `main_address`, which is equal on all ranks.

        Raises:
            ConfigurationError: ``MASTER_PORT`` is required and not set.
        """
        port = self.variables.port()
        return self._default_port() if port is None else port

    @property
    def job(self) -> str | None:
        """The name that the launcher or cluster gives the job, or None. The name is equal on all ranks.

        The name distinguishes jobs that use the same address and port. In every environment, ``TORCHELASTIC_RUN_ID``
        overrides the name.
        """
        name = self.variables.text("TORCHELASTIC_RUN_ID")
        return self._default_job() if name in (None, "none") else name  # torchrun's default is "none"

    @property
    def agent_hosts_store(self) -> bool:
        """Whether a launcher's agent hosts the store at `main_address`, so that rank 0 must not host it."""
        return False

    @property
    def restart_count(self) -> int:
        """How often the processes were restarted. Include the count in keys of a store that outlives the processes."""
        return self.variables.integer_or(0, "TORCHELASTIC_RESTART_COUNT")

    def _default_address(self) -> str:
        return "127.0.0.1"

    def _default_job(self) -> str | None:
        return None

    def _default_port(self) -> int:
        return self.variables.integer("MASTER_PORT")
