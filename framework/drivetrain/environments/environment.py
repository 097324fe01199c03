"""Environment: the interface through which a process learns its `Placement`, and where the processes meet."""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

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
        if self.variables.text("MASTER_PORT") is None:
            return self._default_port()
        return self.variables.integer("MASTER_PORT")

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
