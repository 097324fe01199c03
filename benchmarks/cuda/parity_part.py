"""The parity suite on devices: each strategy on NCCL against the hand-written loop on the same device."""

from __future__ import annotations

from benchmarks.cuda.outcome import Outcome
from benchmarks.cuda.parts import Piece
from benchmarks.cuda.pytest_runs import run_tests

COLUMNS = ["Strategy", "devices", "equal", "refused by name", "differ", "skipped"]
REHEARSED_CASES = "plain,accumulated,token-weighted,GAN"
MOST = 4
"""Ranks: each case's batches can be dealt to so many."""


def measured(piece: Piece, count: int, rehearse: bool) -> Outcome:
    ranks = piece.ranks or max(each for each in (1, 2, MOST) if each <= count)
    strategy = piece.name.removesuffix("-on-all")
    variables = {"PARITY_DEVICE": "cuda", "PARITY_RANKS": str(ranks)}
    if rehearse:
        variables["PARITY_CASES"] = REHEARSED_CASES
    chosen = f"{strategy}-{ranks}- and (test_training or test_refused)"
    ran = run_tests(["tests/parity/test_parity.py", "-k", chosen], max(ranks, count) if rehearse else 0, variables)
    refused = sum("test_refused" in name for name in ran.names)
    counts = [ran.passed - refused, refused, len(ran.failed), len(ran.skipped)]
    outcome = Outcome(COLUMNS, [[f"`{strategy}`", str(ranks), *map(str, counts)]])
    outcome.figures = {"failed": ran.failed, "skipped": ran.skipped, "passed": ran.names}
    outcome.failures = [f"{name}: {said}" for name, said in ran.failed.items()]
    if not ran.passed and not ran.failed:
        outcome.failures.append("no test was run")
    if rehearse:
        outcome.notes.append(f"of the cases {REHEARSED_CASES}")
    return outcome
