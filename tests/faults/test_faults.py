"""Runs with injected faults end soon, report the cause, and resume with the same results: F-05, G-01, G-02, G-04."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import pytest
from drawing_run import STRATEGIES
from outcomes import Tally, table
from striking import Fault

from drivetrain.testing import requires_linux, run_distributed
from faults import LIMIT, try_faults

FIRST = {
    "ddp": [Fault("stalls", 1, "training_step", 9), Fault("killed", 0, "on_validation_start")],
    "fsdp": [Fault("cut off", 1, "on_after_backward", 5), Fault("raises", 1, "on_save_checkpoint", 2)],
}
"""What is tried first; all that is tried where nobody asks for more."""

FAULTS = int(os.environ.get("FAULTS", "0"))
SEED = int(os.environ.get("FAULTS_SEED", "5"))
RUNS = [int(number) for number in os.environ.get("FAULTS_RUNS", "").split(",") if number]
AT_ONCE = int(os.environ.get("FAULTS_AT_ONCE", "2" if FAULTS else "1"))
TALLIES: list[Tally] = []


@requires_linux()
@pytest.mark.timeout(60 + 25 * FAULTS)
@pytest.mark.parametrize("strategy", STRATEGIES if FAULTS else FIRST)
def test_a_run_with_faults_has_the_same_results(strategy: str, tmp_path: Path) -> None:
    first = FIRST.get(strategy, [])
    faults = max(len(first), -(-FAULTS // len(STRATEGIES)))
    # In processes that have imported torch and have no threads, so that ranks can be forked from them quickly.
    limit = 50 + 25 * FAULTS
    task = (tmp_path, strategy, faults, SEED, first, RUNS)
    tally = Tally()
    for share in run_distributed(try_faults, AT_ONCE, *task, process_group=None, timeout=limit):
        tally.add(share)
    TALLIES.append(tally)
    print(f"\n{table(TALLIES)}")
    failed = ",".join(str(number) for number in sorted(tally.failed))
    variables = f"FAULTS={FAULTS} FAULTS_SEED={SEED} FAULTS_RUNS={failed}"
    again = f"""{variables} make faults ARGS="-k 'run_with_faults and {strategy.split()[0]}'\""""
    assert not failed, "\n".join([f"again: {again}", *tally.failed.values()])
    assert RUNS or len(tally.outcomes) >= faults
    assert max(tally.waits(), default=0.0) < LIMIT
    raised = tally.waits("raises")
    assert len(raised) < 3 or statistics.median(raised) < 5
