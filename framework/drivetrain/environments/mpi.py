"""Processes started by mpirun or mpiexec: Open MPI, MPICH, Intel MPI, MVAPICH."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from drivetrain.environments._nodes import infer_placement
from drivetrain.environments._variables import job_port
from drivetrain.environments.environment import Environment
from drivetrain.environments.placement import Placement
from drivetrain.errors import ConfigurationError

# Rank, size, local rank and local size; each MPI implementation sets one row.
_FAMILIES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid", "PMI_JOBID")


class MPIEnvironment(Environment):
    """Processes that `mpirun` or `mpiexec` started. MPI itself is neither needed nor initialised.

    MPI provides no rendezvous address: on several nodes ``MASTER_ADDR`` has to be passed
    (``mpirun -x MASTER_ADDR=host0``), and also ``MASTER_PORT`` if the job has no name to derive a port from.
    """

    name: ClassVar[str] = "mpi"

    @classmethod
    def detect(cls, variables: Mapping[str, str]) -> bool:
        """Return True if the rank and size of an MPI implementation are set. PMI's are ignored if `srun` set them."""
        in_slurm_step = "SLURM_STEP_ID" in variables
        return any(
            bool(variables.get(rank) and variables.get(size)) and not (rank == "PMI_RANK" and in_slurm_step)
            for rank, size, *_ in _FAMILIES
        )

    def placement(self) -> Placement:
        """Return the placement from the MPI implementation's variables."""
        read = self.variables
        ranks, sizes, local_ranks, local_sizes = zip(*_FAMILIES, strict=True)
        world_size = read.integer(*sizes)
        if world_size == 1:
            return Placement(rank=read.integer(*ranks))
        return infer_placement(read.integer(*ranks), world_size, read.integer(*local_ranks), read.integer(*local_sizes))

    def _default_address(self) -> str:
        num_nodes = self.placement().num_nodes
        if num_nodes > 1:
            raise ConfigurationError(
                f"MASTER_ADDR is not set, but the {num_nodes} nodes of this MPI job need a rendezvous address",
                "MPI does not tell its processes the name of the first node",
                "pass it: mpirun -x MASTER_ADDR=<host of rank 0> (Open MPI) or mpiexec -genv MASTER_ADDR <host>",
            )
        return super()._default_address()

    def _default_job(self) -> str | None:
        job = self.variables.text(*_JOB)
        return None if job is None else f"MPI's job {job}"

    def _default_port(self) -> int:
        job = self.variables.text(*_JOB)
        return job_port("mpi", job) if job else super()._default_port()
