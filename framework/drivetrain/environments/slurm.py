"""SLURM, whose srun starts the processes."""

from __future__ import annotations

import re
from typing import ClassVar

from drivetrain.environments.environment import Environment, Placement, job_port


class SlurmEnvironment(Environment):
    """Processes that `srun` started.

    A process that a job script or an interactive shell starts without srun is a single process, even if the job has
    several tasks. The other tasks do not exist in this case, and a process that waited for them would hang.
    """

    name: ClassVar[str] = "slurm"

    def placement(self) -> Placement:
        """Return the placement from SLURM's variables. The step's variables take precedence over the job's."""
        variables = self.variables
        node_rank = variables.integer("SLURM_NODEID")
        world_size = variables.integer("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        num_nodes = variables.integer("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
        return Placement(
            rank=variables.integer("SLURM_PROCID"),
            world_size=world_size,
            local_rank=variables.integer("SLURM_LOCALID"),
            local_world_size=self._tasks_on(node_rank, world_size // max(1, num_nodes)),
            node_rank=node_rank,
            num_nodes=num_nodes,
        )

    @property
    def restart_count(self) -> int:
        """How often the job was requeued."""
        return self.variables.integer_or(0, "SLURM_RESTART_COUNT")

    def _default_address(self) -> str:
        nodes = self.variables.text("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
        return super()._default_address() if nodes is None else first_node(nodes)

    def _default_job(self) -> str | None:
        job = self.variables.text("SLURM_JOB_ID", "SLURM_JOBID")
        return None if job is None else f"SLURM's job {job}, step {self._step()}"

    def _default_port(self) -> int:
        # Two steps of one job may run on one node at the same time.
        return job_port("slurm", self.variables.text("SLURM_JOB_ID", "SLURM_JOBID") or "", self._step())

    def _step(self) -> str:
        return self.variables.text("SLURM_STEP_ID", "SLURM_STEPID") or ""

    def _tasks_on(self, node_rank: int, default: int) -> int:
        """Return the number of tasks on a node, from SLURM's compressed form: ``"2(x3),1"`` is 2, 2, 2, 1."""
        text = self.variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        counts: list[int] = []
        for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", text or ""):
            counts += [int(count)] * int(repeats or 1)
        return counts[node_rank] if node_rank < len(counts) else default


def first_node(nodes: str) -> str:
    """Return the first host of SLURM's compressed form: ``"rack1n03"`` for ``"rack[1-2]n[03-05,9],gpu7"``."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else nodes)
