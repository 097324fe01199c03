"""Runs a program both ways and compares: what tests, the command and printed scripts call."""

from __future__ import annotations

import tempfile
from dataclasses import replace

from drivetrain.errors import DrivetrainError
from fuzz.compare import differences
from fuzz.engine import launched, run
from fuzz.interpreter import interpret
from fuzz.outcome import Outcome
from fuzz.program import Program
from worlds import on_ranks


class Difference(AssertionError):
    """What came out is not what must."""


def check(program: Program, plant: str = "") -> None:
    """Run ``program`` under the engine and by hand.

    Raises:
        Difference: they differ; says in what.
    """
    found = found_in(program, plant)
    if found:
        raise Difference("; ".join(found[:6]))


def found_in(program: Program, plant: str = "") -> list[str]:
    """What differs, a phrase each."""
    expected = interpret(program)
    if program.launcher:
        return differences(program, expected, [launched(program, plant)])
    with tempfile.TemporaryDirectory(prefix="drivetrain-fuzz-") as folder:
        path = f"{folder}/checkpoint" if program.resume is not None else ""
        try:
            plain = expected if program.resume is None else interpret(replace(program, resume=None))
            outcomes = on(program.ranks, program, path, False, plant)
            found = differences(program, plain, outcomes)
            if found or program.resume is None or expected.saved_after < 0 or any(one.error for one in outcomes):
                return found
            outcomes = on(program.resume.ranks, program, path, True, plant)
            return [f"resumed: {what}" for what in differences(program, expected, outcomes, resumed=True)]
        except DrivetrainError as error:
            return [f"ranks failed: {error}"]


def on(ranks: int, program: Program, path: str, resumed: bool, plant: str) -> list[Outcome]:
    """Run on so many kept ranks."""
    return on_ranks(run, ranks, program, path, resumed, plant, timeout=30)
