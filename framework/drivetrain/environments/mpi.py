"""Processes started by mpirun or mpiexec: Open MPI, MPICH, Intel MPI, MVAPICH."""

from __future__ import annotations

from typing import ClassVar

from drivetrain.environments.environment import Environment, job_port
from drivetrain.environments.placement import Placement
from drivetrain.errors import ConfigurationError

# The variables of the rank, size, local rank and local size. Each MPI implementation sets the variables of one row.
VARIABLE_FAMILIES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# Variables that may hold the name of the job.
_JOB_VARIABLES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid", "PMI_JOBID")


class MPIEnvironment(Environment):
    """Processes that `mpirun` or `mpiexec` started. MPI itself is neither needed nor initialised.

    MPI provides no rendezvous address. On several nodes ``MASTER_ADDR`` has to be passed, as in
    ``mpirun -x MASTER_ADDR=host0``. ``MASTER_PORT`` has to be passed too if the job has no name to derive a port from.
    """

    name: ClassVar[str] = "mpi"

    def placement(self) -> Placement:
        """Return the placement from the MPI implementation's variables."""
        variables = self.variables
        ranks, sizes, local_ranks, local_sizes = zip(*VARIABLE_FAMILIES, strict=True)
        world_size = variables.integer(*sizes)
        if world_size == 1:
            return Placement(rank=variables.integer(*ranks))
        return Placement.of_unknown_node(
            variables.integer(*ranks), world_size, variables.integer(*local_ranks), variables.integer(*local_sizes)
        )

    def _default_address(self) -> str:
        num_nodes = self.placement().num_nodes
        if num_nodes > 1:
            raise ConfigurationError(
                f"MASTER_ADDR is not set, but the {num_nodes} nodes of this MPI job need a rendezvous address",
                "MPI does not tell its processes the name of the first node",
                "set it: mpirun -x MASTER_ADDR=<host of rank 0> (Open MPI) or mpiexec -genv MASTER_ADDR <host>",
            )
        return super()._default_address()

    def _default_job(self) -> str | None:
        job = self.variables.text(*_JOB_VARIABLES)
        return None if job is None else f"MPI's job {job}"

    def _default_port(self) -> int:
        job = self.variables.text(*_JOB_VARIABLES)
        return job_port("mpi", job) if job else super()._default_port()
