"""Imitates `srun --nodes 2 --ntasks 2 command ...` on a machine without SLURM: the environment and end of its tasks.

Both tasks run on this machine, whichever node their variables name. As with `srun --kill-on-bad-exit=0`, SLURM's
default, a task that fails does not end the other: it has to detect it itself.
"""

from __future__ import annotations

import os
import subprocess
import sys

_SHARED = {
    "SLURM_JOB_ID": str(os.getpid()),
    "SLURM_JOB_NAME": "train",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
}

if __name__ == "__main__":
    places = [{"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)} for rank in range(2)]
    tasks = [subprocess.Popen(sys.argv[1:], env=os.environ | _SHARED | place) for place in places]
    sys.exit(max(abs(task.wait()) for task in tasks))
