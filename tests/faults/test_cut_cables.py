"""Under torchrun --max-restarts a run resumes by itself after a rank was killed, and after a node had lost its link.

Rows B-01, F-02, G-02, G-04.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import restarted_run
from two_nodes import two_nodes, why_not

from drivetrain.testing import requires_linux, run_distributed

LIMIT = 90.0  # seconds


def _undisturbed(folder: Path) -> Any:
    return run_distributed(restarted_run.undisturbed, 2, folder / "undisturbed", process_group=None, timeout=150)


@requires_linux()
def test_a_killed_worker_is_restarted_and_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "--monitor-interval", "0.1", restarted_run.__file__, str(tmp_path), "killed"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    undisturbed = _undisturbed(tmp_path)
    printed, _ = run.communicate(timeout=120)
    assert run.returncode == 0, printed
    assert restarted_run.starts(tmp_path) == [0, 2]  # from the last complete checkpoint
    assert restarted_run.results(tmp_path) == undisturbed


def _wait_until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.05)


@pytest.mark.skipif("FAULTS" not in os.environ, reason="a minute of waiting for timeouts: make faults")
@pytest.mark.timeout(4 * LIMIT)
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_link_that_goes_down(comes_back: bool, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    outs, step = [tmp_path / f"node-{node}" for node in (0, 1)], tmp_path / "step-0"
    with two_nodes() as nodes:
        command = restarted_run.__file__, str(tmp_path), "slow"
        runs = [nodes.torchrun(node, *command, max_restarts=2 * comes_back, out=outs[node]) for node in (0, 1)]
        _wait_until(lambda: step.exists() and int(step.read_text() or 0) >= 3, "step 3")
        nodes.link(up=False)
        down = time.monotonic()
        _wait_until(lambda: "Rank 0 has lost rank 1" in outs[0].read_text(), "the loss of rank 1")
        assert time.monotonic() - down < restarted_run.TIMEOUT + 20  # G-04
        if not comes_back:
            assert runs[0].wait(LIMIT) == 1
            # Its torchrun waits until the system gives up the connection; its rank does not.
            _wait_until(lambda: "Rank 1 has lost the store" in outs[1].read_text(), "the loss of the store")
            return
        nodes.link(up=True)
        for run in runs:
            assert run.wait(LIMIT) == 0, [out.read_text() for out in outs]
    first, *later = restarted_run.starts(tmp_path)
    assert (first, min(later) >= 2) == (0, True), later
    assert restarted_run.results(tmp_path) == _undisturbed(tmp_path)
