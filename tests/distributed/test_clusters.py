"""Processes started by a cluster's own program train together, and end together. Rows A-06, B-01, G-01, G-02."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from scripts import HERE, run_script

MPIRUN = ("mpirun", "-n", "2", "--allow-run-as-root", "--oversubscribe")
SRUN = (sys.executable, f"{HERE}/stub_srun.py", "--nodes", "2", "--ntasks", "2")

STARTERS = [
    pytest.param(
        MPIRUN,
        id="mpirun",
        marks=pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)"),
    ),
    pytest.param(SRUN, id="srun"),
]

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
        if batch_idx == 3 and RANK == {rank}:
            {how}
        return super().training_step(batch, batch_idx)

began = time.monotonic()
try:
    quiet(strategy="ddp").fit(Failing(), loader(64, 4))
finally:
    say("ended", time.monotonic() - began < 20)
"""


@pytest.mark.parametrize("starter", STARTERS)
def test_ranks_of_a_cluster_train_as_one_and_end_with_the_first_cause(  # A-06, B-01, G-01
    starter: tuple[str, ...], tmp_path: Path
) -> None:
    script = _SCRIPT.format(rank=1, how='raise ValueError(f"boom on {RANK}")')
    run = run_script(tmp_path, script, starter=starter)
    nodes = [(0, 0), (0, 1)] if starter is MPIRUN else [(0, 0), (1, 0)]
    for rank, (node, local) in enumerate(nodes):
        assert f"{rank} trained True 2 {node} {local}" in run.said, run.errors
    assert run.code != 0
    assert "ValueError: boom on 1" in run.errors
    assert "1 ended True" in run.said
    if starter is SRUN:  # mpirun ends the others as soon as one has failed, possibly before they print anything
        assert "0 ended True" in run.said
        assert "Rank 1 failed with ValueError: boom on 1" in run.errors


def test_a_task_that_is_killed_with_the_store_ends_the_others(tmp_path: Path) -> None:  # G-02
    script = _SCRIPT.format(rank=0, how="os.kill(os.getpid(), signal.SIGKILL)")
    run = run_script(tmp_path, script, starter=SRUN)
    assert run.code != 0
    assert "1 ended True" in run.said, run.errors
    assert "DistributedError: Rank 1 has lost the store where all ranks meet" in run.errors
    assert "task 0: Killed by signal 9" in run.errors
