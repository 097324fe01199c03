"""Environment: the interface through which a process learns its rank, the world size and the rendezvous address."""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from drivetrain.environments.placement import Placement
from drivetrain.errors import ConfigurationError

# The range of ports for jobs lies below Linux's ephemeral ports, which start at 32768, and above the ports of services.
_FIRST_PORT, _PORT_COUNT = 20_000, 10_000


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

    def with_address(self, placement: Placement) -> Placement:
        """Return ``placement`` with the address and the port where the processes meet, and the name of their job."""
        return replace(placement, address=self.main_address, port=self.main_port, job=self.job)

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


class Variables:
    """The environment variables of a launcher or cluster. Errors name the variable that is wrong.

    Args:
        variables: the variables, as in ``os.environ``.
        launcher: the name of the launcher that sets the variables, for errors.
    """

    __slots__ = ("_launcher", "_values")

    def __init__(self, variables: Mapping[str, str], launcher: str) -> None:
        self._values = dict(variables)
        self._launcher = launcher

    def text(self, *names: str) -> str | None:
        """Return the value of the first of ``names`` that is set and not empty."""
        return next((self._values[name] for name in names if self._values.get(name)), None)

    def integer(self, *names: str) -> int:
        """Return the value of the first of ``names`` that is set.

        Raises:
            ConfigurationError: none of the variables is set, or the value is not a non-negative integer.
        """
        for name in names:
            if self._values.get(name):
                return self._parse(name, self._values[name])
        raise ConfigurationError(
            f"{' or '.join(names)} is not set",
            f"{self._launcher} was detected or chosen as the environment, and sets this variable",
            "start the processes with that launcher, or choose another with Fit(environment=...)",
        )

    def integer_or(self, default: int, *names: str) -> int:
        """Return the value of the first of ``names`` that is set, or ``default`` if none is set."""
        return default if self.text(*names) is None else self.integer(*names)

    def port(self) -> int | None:
        """Return the value of ``MASTER_PORT``, or None if the variable is not set.

        Raises:
            ConfigurationError: the value is not a port.
        """
        if self.text("MASTER_PORT") is None:
            return None
        port = self.integer("MASTER_PORT")
        if not 0 < port < 2**16:
            raise ConfigurationError(
                f"MASTER_PORT={port} is not a port", "ports are from 1 to 65535", "set MASTER_PORT to a free port"
            )
        return port

    def refuse(self, names: Iterable[str], why: str, fix: str) -> ConfigurationError:
        """Return an error that shows the values of the variables ``names``."""
        shown = ", ".join(f"{name}={self._values[name]}" for name in names if name in self._values)
        return ConfigurationError(f"{shown} cannot be right", why, fix)

    def _parse(self, name: str, value: str) -> int:
        if not value.strip().isdecimal():
            raise ConfigurationError(
                f"{name}={value!r} is not a number",
                f"{self._launcher} sets {name} to a non-negative integer",
                f"correct {name}, or unset {name} so that the launcher sets the variable",
            )
        return int(value)


def job_port(*job: str) -> int:
    """Return a port that is derived from ``job``, the words of a job's name. Two jobs rarely get the same port."""
    return _FIRST_PORT + zlib.crc32("/".join(job).encode()) % _PORT_COUNT
