"""Runs a program both ways and compares the results; used by tests, the command and printed scripts."""

from __future__ import annotations

import tempfile
from dataclasses import replace

from drivetrain.errors import DrivetrainError
from fuzz.compare import LOOSE, differences, weights_of
from fuzz.engine import launched, run
from fuzz.interpreter import interpret
from fuzz.outcome import Outcome
from fuzz.program import Program
from worlds import on_ranks


class Difference(AssertionError):
    """Raised when results differ from the expected ones."""


def check(program: Program, plant: str = "") -> None:
    """Run ``program`` under the engine and by hand.

    Raises:
        Difference: the results differ; the message states in what.
    """
    found = found_in(program, plant)
    if found:
        raise Difference("; ".join(found[:6]))


def found_in(program: Program, plant: str = "") -> list[str]:
    """Return the differences, as one phrase each."""
    expected = interpret(program)
    if program.launcher:
        return differences(program, expected, [launched(program, plant)])
    with tempfile.TemporaryDirectory(prefix="drivetrain-fuzz-") as folder:
        root = folder if program.resume is not None else ""
        try:
            plain = expected if program.resume is None else interpret(replace(program, resume=None))
            outcomes = on(program.ranks, program, root, False, plant)
            found = differences(program, plain, outcomes)
            failed = any(one.error for one in outcomes)
            if not found and program.resume is not None and expected.saved_after >= 0 and not failed:
                outcomes = on(program.resume.ranks, program, root, True, plant)
                if expected.saved_at_end and all("nothing is left to train" in one.text for one in outcomes):
                    return []
                found = [f"resumed: {what}" for what in differences(program, expected, outcomes, resumed=True)]
                failed = any(one.error for one in outcomes)
            return found if failed or not found or is_stable(program, expected) else []
        except DrivetrainError as error:
            return [f"ranks failed: {error}"]


def is_stable(program: Program, expected: Outcome) -> bool:
    """Return whether the loop has nearly the same results after a rounding-sized change of the initial weights.

    The results of other programs cannot be compared.
    """
    if expected.error:
        return True
    near = LOOSE[program.precision] / 4
    return not any(weights_of(expected.weights, interpret(program, nudged=seed).weights, near) for seed in range(3))


def on(ranks: int, program: Program, root: str, resumed: bool, plant: str) -> list[Outcome]:
    """Run on the given number of shared ranks."""
    return on_ranks(run, ranks, program, root, resumed, plant, timeout=30)
