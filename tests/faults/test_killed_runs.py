"""Runs that are killed at any instant resume with the same results: F-02, F-05, F-07, F-08, G-02."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from drawing_run import STRATEGIES
from killing import kill_runs

from drivetrain.testing import requires_linux, run_distributed

FAULTS = int(os.environ.get("FAULTS", "8"))
SEED = int(os.environ.get("FAULTS_SEED", "5"))


@requires_linux()
@pytest.mark.timeout(60 + 20 * FAULTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_killed_run_has_the_same_results(strategy: str, tmp_path: Path) -> None:
    kills = -(-FAULTS // len(STRATEGIES))
    # In a process that has imported torch and has no threads, so that ranks can be forked from it quickly.
    limit = 50 + 20 * FAULTS
    [tally] = run_distributed(kill_runs, 1, tmp_path, strategy, kills, SEED, process_group=None, timeout=limit)
    print(f"\n{tally}")
    assert tally.kills >= kills
    assert tally.longest_wait < 15  # G-02
    assert tally.within_saves or kills < 10, "no kill hit a save: the instants are chosen badly"
