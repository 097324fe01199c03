"""Environment: reads who this process is among how many, and where they meet."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from drivetrain.environments._variables import Variables
from drivetrain.environments.placement import Placement


class Environment(ABC):
    """How a launcher or a cluster tells its processes who they are.

    Reads a copy of the variables, taken at construction, and nothing else: it can be tested without the cluster.

    Args:
        variables: in place of ``os.environ``.
    """

    name: ClassVar[str]
    """As in ``Fit(environment=...)``."""

    started_us: ClassVar[bool] = True
    """Whether somebody else started the processes, so that we join them and start none."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self.variables = Variables(os.environ if variables is None else variables, self.name)

    @classmethod
    @abstractmethod
    def detect(cls, variables: Mapping[str, str]) -> bool:
        """Tell whether ``variables`` are those of a process in such an environment."""

    @abstractmethod
    def placement(self) -> Placement:
        """Return who this process is.

        Raises:
            ConfigurationError: a variable is missing, is not a number or contradicts another; it is named.
        """

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
    def agent_store(self) -> bool:
        """Whether somebody else hosts the store at `main_address`, so that rank 0 must not."""
        return False

    @property
    def restart_count(self) -> int:
        """How often the processes were restarted. Keys in a store that outlives them must carry it."""
        return self.variables.integer_or(0, "TORCHELASTIC_RESTART_COUNT")

    def _default_address(self) -> str:
        return "127.0.0.1"

    def _default_port(self) -> int:
        return self.variables.integer("MASTER_PORT")
