"""IBM LSF, whose jsrun starts the processes."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from drivetrain.environments.environment import Environment, Placement, job_port
from drivetrain.errors import ConfigurationError


class LSFEnvironment(Environment):
    """Processes that `jsrun` started in an LSF job."""

    name: ClassVar[str] = "lsf"

    def placement(self) -> Placement:
        """Return the placement from jsrun's variables."""
        variables = self.variables
        return Placement.of_unknown_node(
            variables.integer("JSM_NAMESPACE_RANK"),
            variables.integer("JSM_NAMESPACE_SIZE"),
            variables.integer("JSM_NAMESPACE_LOCAL_RANK"),
            variables.integer("JSM_NAMESPACE_LOCAL_SIZE"),
        )

    def _default_address(self) -> str:
        num_nodes = self.placement().num_nodes
        if num_nodes == 1:
            return super()._default_address()
        hosts = self._hosts()
        # On machines with launch nodes, the first host only runs the job script.
        return hosts[1] if len(hosts) > num_nodes else hosts[0]

    def _default_job(self) -> str | None:
        return f"LSF's job {self.variables.text('LSB_JOBID')}, step {self._step()}"

    def _default_port(self) -> int:
        return job_port("lsf", self.variables.text("LSB_JOBID") or "", self._step())

    def _step(self) -> str:
        return self.variables.text("JSM_NAMESPACE_ID", "PMIX_NAMESPACE") or ""

    def _hosts(self) -> list[str]:
        """Return the hosts of the job in order, without duplicates."""
        file = self.variables.text("LSB_DJOB_RANKFILE")
        if file is None:
            raise ConfigurationError(
                "LSB_DJOB_RANKFILE is not set, so the hosts of this job are unknown",
                "the first host is the rendezvous address",
                "set MASTER_ADDR to the host of rank 0",
            )
        return list(dict.fromkeys(Path(file).read_text().split()))
