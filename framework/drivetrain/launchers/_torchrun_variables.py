"""The environment variables of ranks. torchrun sets the same variables, and most libraries read them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from drivetrain._distributed.rendezvous import NO_NAME
from drivetrain.environments import Placement


def torchrun_variables(placement: Placement, address: str, port: int, run_id: str = NO_NAME) -> dict[str, str]:
    """Return the variables that torchrun would set for the process at ``placement``.

    Args:
        placement: the rank of the process.
        address: the host of the store.
        port: the port of the store.
        run_id: the name of the job, equal for all processes of the job. The store refuses processes of other jobs.
    """
    return {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "GROUP_RANK": str(placement.node_rank),
        "GROUP_WORLD_SIZE": str(placement.num_nodes),
        "ROLE_RANK": str(placement.rank),
        "ROLE_WORLD_SIZE": str(placement.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
    }


def suggested_threads(local_world_size: int) -> int:
    """Return the number of compute threads that gives each process of this node an equal share of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size)


def thread_variables(local_world_size: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return ``OMP_NUM_THREADS`` for a process of this node, or an empty dict if the user has set the variable."""
    return {} if variables.get("OMP_NUM_THREADS") else {"OMP_NUM_THREADS": str(suggested_threads(local_world_size))}
