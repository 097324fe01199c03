"""Tests that are marked ``cuda``, each file in a process of its own."""

from __future__ import annotations

from benchmarks.cuda.outcome import Outcome
from benchmarks.cuda.parts import ROOT, Piece
from benchmarks.cuda.pytest_runs import run_tests

COLUMNS = ["File", "passed", "failed", "skipped"]
NOT_EMULATED = {"fsdp_cuda": "test_blocks_that_are_compiled"}
"""By file, what the emulation cannot do: code that is compiled for a device."""


def measured(piece: Piece, count: int, rehearse: bool) -> Outcome:
    (path,) = (ROOT / "tests").rglob(f"test_{piece.name}.py")
    arguments = [str(path.relative_to(ROOT)), "-m", "cuda"]
    left_out = NOT_EMULATED.get(piece.name) if rehearse else None
    if left_out:
        arguments += ["-k", f"not {left_out}"]
    ran = run_tests(arguments, count if rehearse else 0)
    counts = ran.passed, len(ran.failed), len(ran.skipped)
    outcome = Outcome(COLUMNS, [[f"`{path.relative_to(ROOT)}`", *map(str, counts)]])
    outcome.figures = {"failed": ran.failed, "skipped": ran.skipped, "passed": ran.names}
    outcome.failures = [f"{name}: {said}" for name, said in ran.failed.items()]
    if ran.code not in (0, 1) and not ran.failed:
        outcome.failures.append(f"pytest ended with code {ran.code}")
    if left_out:
        outcome.not_shown.append(f"{left_out}: code that is compiled for a device")
    reasons = dict.fromkeys(ran.skipped.values())
    outcome.notes += [f"skipped: {reason}" for reason in reasons]
    return outcome
