"""Faulty runs end soon, name the cause, and resume with equal results: F-02, F-05, F-07, F-08, G-01, G-02, G-04."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from drawing_run import STRATEGIES
from striking import ANY_INSTANT, Fault

from drivetrain.testing import requires_linux, run_distributed
from faults import KINDS, LIMIT, Outcome, Tally, table, try_faults

FIRST = {
    "single": [Fault(ANY_INSTANT), Fault(ANY_INSTANT)],
    "ddp": [Fault("stalls", 1, "training_step", 9), Fault("killed", 0, "on_validation_start"), Fault(ANY_INSTANT)],
    "fsdp": [Fault("cut off", 1, "on_after_backward", 5), Fault("raises", 1, "on_save_checkpoint", 2)],
    "zero 3": [Fault(ANY_INSTANT), Fault(ANY_INSTANT)],
}
"""What is tried first; all that is tried where nobody asks for more."""

FAULTS = int(os.environ.get("FAULTS", "0"))
SEED = int(os.environ.get("FAULTS_SEED", "5"))
RUNS = [int(number) for number in os.environ.get("FAULTS_RUNS", "").split(",") if number]
AT_ONCE = int(os.environ.get("FAULTS_AT_ONCE", "2" if FAULTS else "1"))
OUTCOMES: list[Outcome] = []


def _try(folder: Path, strategy: str, first: Sequence[Fault], kinds: Sequence[str], test: str) -> Tally:
    faults = max(len(first), -(-FAULTS // len(STRATEGIES)))
    # In processes that have imported torch and have no threads, so that ranks can be forked from them quickly.
    task = (folder, strategy, faults, SEED, first, RUNS, kinds)
    tally = Tally()
    for share in run_distributed(try_faults, AT_ONCE, *task, process_group=None, timeout=50 + 25 * FAULTS):
        tally.outcomes += share.outcomes
        tally.failed |= share.failed
    OUTCOMES.extend(tally.outcomes)
    print(f"\n{table(OUTCOMES)}")
    failed = ",".join(str(number) for number in sorted(tally.failed))
    variables = f"FAULTS={FAULTS} FAULTS_SEED={SEED} FAULTS_RUNS={failed}"
    again = f"""{variables} make faults ARGS="-k '{test} and {strategy.split()[0]}'\""""
    assert not failed, "\n".join([f"again: {again}", *tally.failed.values()])
    assert RUNS or len(tally.outcomes) >= faults
    assert max(tally.waits(), default=0.0) < LIMIT
    return tally


@requires_linux()
@pytest.mark.timeout(60 + 25 * FAULTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_with_faults_has_the_same_results(strategy: str, tmp_path: Path) -> None:
    raised = _try(tmp_path, strategy, FIRST[strategy], KINDS, "run_with_faults").waits("raises")
    assert len(raised) < 3 or statistics.median(raised) < 5


@requires_linux()
@pytest.mark.timeout(60 + 25 * FAULTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.skipif(not FAULTS, reason="test_a_run_with_faults kills a few: make faults")
def test_a_killed_run_has_the_same_results(strategy: str, tmp_path: Path) -> None:
    tally = _try(tmp_path, strategy, (), [ANY_INSTANT], "killed_run")
    within = [one for one in tally.outcomes if one.fault.kind.endswith("in a save")]
    assert within or len(tally.outcomes) < 10, "no kill hit a save: the instants are chosen badly"
