"""Runs that seeded faults strike end soon, say why, and go on as if nothing had happened: F-05, G-01, G-02, G-04."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import pytest
from drawing_run import STRATEGIES
from striking import Fault

from drivetrain.testing import requires_linux, run_distributed
from faults import LIMIT, Tally, table, try_faults

FIRST = {
    "ddp": [Fault("stalls", 1, "training_step", 9), Fault("killed", 0, "on_validation_start")],
    "fsdp": [Fault("cut off", 1, "on_after_backward", 5), Fault("raises", 1, "on_save_checkpoint")],
}
"""What is tried first; all that is tried where nobody asks for more."""

FAULTS = int(os.environ.get("FAULTS", "0"))
SEED = int(os.environ.get("FAULTS_SEED", "5"))
ROWS: list[Tally] = []


@requires_linux()
@pytest.mark.timeout(60 + 25 * FAULTS)
@pytest.mark.parametrize("strategy", STRATEGIES if FAULTS else FIRST)
def test_a_struck_run_comes_to_the_same_end(strategy: str, tmp_path: Path) -> None:
    first = FIRST.get(strategy, [])
    faults = max(len(first), -(-FAULTS // len(STRATEGIES)))
    # In a process that has imported torch and has no threads, so that ranks are forked from it in no time.
    limit = 50 + 25 * FAULTS
    [tally] = run_distributed(try_faults, 1, tmp_path, strategy, faults, SEED, first, process_group=None, timeout=limit)
    ROWS.append(tally)
    print(f"\n{table(ROWS)}")
    assert tally.survived == tally.faults >= faults
    assert max(tally.waited, default=0.0) < LIMIT
    assert len(tally.noticed) < 3 or statistics.median(tally.noticed) < 5
