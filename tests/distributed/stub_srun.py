"""Imitates `srun` on a machine without SLURM: the environment, output and termination of its tasks.

python stub_srun.py --nodes 2 --ntasks 2 command ...

All tasks run on this machine, whichever node their variables name. As with `srun --kill-on-bad-exit=0`, SLURM's
default, a task that fails does not end the others: they have to detect it themselves.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ntasks", type=int, default=1)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    per_node = options.ntasks // options.nodes
    shared = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NAME": "train",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": str(options.nodes),
        "SLURM_STEP_NUM_TASKS": str(options.ntasks),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{options.nodes})",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(options.ntasks),
    }
    tasks = [
        subprocess.Popen(
            options.command,
            env=os.environ
            | shared
            | {
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank % per_node),
                "SLURM_NODEID": str(rank // per_node),
            },
        )
        for rank in range(options.ntasks)
    ]
    codes = [task.wait() for task in tasks]
    for rank, code in enumerate(codes):
        if code:
            how = f"Exited with exit code {code}" if code > 0 else f"Killed by signal {-code}"
            print(f"srun: error: node{rank // per_node}: task {rank}: {how}", file=sys.stderr)
    return max((code if code > 0 else 128 - code) for code in codes)


if __name__ == "__main__":
    sys.exit(main())
