"""Processes started by a cluster's own program train together, and end together. Rows A-06, B-01, G-01, G-02."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from scripts import run_cases, starter

MPIRUN = ("mpirun", "-n", "2", "--allow-run-as-root", "--oversubscribe")
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NAME": "train",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
}

# A rank creates a Fit to learn its place, which only the cluster's variables define.
_SCRIPT = """
module = Model()
fit = quiet(strategy="ddp")
fit.fit(module, loader(64, 4))
RANK = fit.global_rank
reference = weights(train_by_hand(Model(), global_batches(64, 8)))
say("trained", torch.allclose(weights(module), reference, atol=1e-6), fit.world_size, fit.node_rank, fit.local_rank)

class Failing(Model):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and CASE == "rank 0 is killed" and RANK == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if batch_idx == 3 and CASE == "rank 1 raises" and RANK == 1:
            raise ValueError(f"boom on {RANK}")
        return super().training_step(batch, batch_idx)

began = time.monotonic()
try:
    quiet(strategy="ddp").fit(Failing(), loader(64, 4))
finally:
    say("ended", time.monotonic() - began < 20)
"""


@pytest.mark.parametrize("cluster", ["mpirun", "srun"])
def test_ranks_of_a_cluster_train_as_one_and_end_with_the_first_cause(cluster: str, tmp_path: Path) -> None:
    # A-06, B-01, G-01, G-02
    if cluster == "mpirun" and shutil.which(cluster) is None:
        pytest.skip("needs mpirun (Debian: openmpi-bin)")
    SLURM["SLURM_JOB_ID"] = str(os.getpid())  # the port is derived from it
    srun = starter(tmp_path, *(SLURM | {"SLURM_PROCID": rank, "SLURM_NODEID": rank} for rank in "01"))
    cases, started = ["rank 1 raises", "rank 0 is killed"], MPIRUN if cluster == "mpirun" else srun
    raised, killed = run_cases(tmp_path, _SCRIPT, cases, starter=started).values()
    for rank, (node, local) in enumerate([(0, 0), (0, 1)] if cluster == "mpirun" else [(0, 0), (1, 0)]):
        assert f"{rank} trained True 2 {node} {local}" in raised.reported, raised.errors
    assert {"0 ended True", "1 ended True"} <= {*raised.reported}
    assert raised.code != 0
    assert "ValueError: boom on 1" in raised.errors
    assert "Rank 1 failed with ValueError: boom on 1" in raised.errors
    assert "1 ended True" in killed.reported, killed.errors  # rank 0 has the store
    assert "DistributedError: Rank 1 has lost the store where all ranks meet" in killed.errors
