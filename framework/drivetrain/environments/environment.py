"""Environment: reads who this process is among how many, and where they meet."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from drivetrain.environments._variables import Variables
from drivetrain.environments.placement import Placement
from drivetrain.errors import ConfigurationError


class Environment(ABC):
    """How a launcher or a cluster tells its processes who they are. One method must be written: `placement`.

    Reads a copy of the variables, taken at construction, and nothing else: it can be tested without the cluster. The
    rest has defaults: `main_address` and `main_port`, where the processes meet, are ``MASTER_ADDR`` (else this machine)
    and ``MASTER_PORT``; nobody else hosts the store there (`agent_store`), and nothing was restarted
    (`restart_count`). An environment in which processes have yet to be started says so with `started_us`, and may
    write `first_on_node`.

    Give one to ``Fit(environment=...)``, or register a callable without arguments that makes one in the entry-point
    group ``drivetrain.environments``, and give its name.

    Args:
        variables: in place of ``os.environ``.
    """

    name: ClassVar[str] = ""
    """As in ``Fit(environment=...)``, and in errors; the name of the class where none is given."""

    started_us: ClassVar[bool] = True
    """Whether somebody else started the processes, so that we join them and start none."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = cls.name or cls.__name__

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self.variables = Variables(os.environ if variables is None else variables, self.name)

    @abstractmethod
    def placement(self) -> Placement:
        """Return who this process is.

        Raises:
            ConfigurationError: a variable is missing, is not a number or contradicts another; it is named.
        """

    def first_on_node(self, num_nodes: int, local_world_size: int) -> Placement:
        """Return the placement of this process as the first one on its node, whose other processes we start.

        Asked in place of `placement` where `started_us` is false and the run wants several processes.

        Args:
            num_nodes: over how many nodes the run is to be.
            local_world_size: how many processes each is to have.

        Raises:
            ConfigurationError: on several nodes, of which this environment does not know which one this is.
        """
        if num_nodes > 1:
            raise ConfigurationError(
                f"num_nodes={num_nodes} with environment={self.name!r}",
                "it does not say which of the nodes this process is on",
                f"write {type(self).__name__}.first_on_node, or let the cluster start every process",
            )
        return Placement(world_size=local_world_size, local_world_size=local_world_size)

    @classmethod
    def detect(cls, variables: Mapping[str, str]) -> bool:
        """Tell whether ``variables`` are those of a process in such an environment.

        ``Fit(environment="auto")`` asks those that come with drivetrain, and no other: name your own.
        """
        return False

    @property
    def main_address(self) -> str:
        """The host of rank 0, where the processes meet."""
        return self.variables.text("MASTER_ADDR") or self._default_address()

    @property
    def main_port(self) -> int:
        """The port on `main_address`, the same on every rank.

        Raises:
            ConfigurationError: ``MASTER_PORT`` is needed and not set.
        """
        port = self.variables.port()
        return self._default_port() if port is None else port

    @property
    def job(self) -> str | None:
        """What the job is called by who started its processes, the same on every rank; None where nobody said.

        It tells two jobs apart that were given one address and port. ``TORCHELASTIC_RUN_ID`` names it anywhere.
        """
        name = self.variables.text("TORCHELASTIC_RUN_ID")
        return self._default_job() if name in (None, "none") else name  # torchrun says "none" where nobody said

    @property
    def agent_store(self) -> bool:
        """Whether somebody else hosts the store at `main_address`, so that rank 0 must not."""
        return False

    @property
    def restart_count(self) -> int:
        """How often the processes were restarted. Keys in a store that outlives them must carry it."""
        return self.variables.integer_or(0, "TORCHELASTIC_RESTART_COUNT")

    def _default_address(self) -> str:
        return "127.0.0.1"

    def _default_job(self) -> str | None:
        return None

    def _default_port(self) -> int:
        return self.variables.integer("MASTER_PORT")
