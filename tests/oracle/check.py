"""Runs a program both ways and compares the results; used by tests, the command and printed scripts."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import partial

from drivetrain.errors import DrivetrainError
from oracle.compare import DRIVETRAIN_ERRORS, TOLERANCES, differences, evaluation_differences, tensor_differences
from oracle.engine import evaluate, run
from oracle.interpreter import interpret
from oracle.outcome import Outcome
from oracle.program import Program
from worlds import on_ranks

on = partial(on_ranks, timeout=120)


class Difference(AssertionError):
    """The results differ; the message states in what."""


@dataclass
class Verdict:
    found: list[str]  # the differences, as one phrase each
    refused: bool = False  # the engine refused to run, to resume or to evaluate the program, whether rightly or not


def check(program: Program, plant: str = "") -> bool:
    """Run ``program`` both ways; return whether the engine refused it, as it may. Raises `Difference`."""
    verdict = judge(program, plant)
    if verdict.found:
        raise Difference("; ".join(verdict.found[:6]))
    return verdict.refused


def judge(program: Program, plant: str = "") -> Verdict:
    expected = interpret(program)
    if program.launcher:
        return Verdict(differences(program, expected, [run(program, "", False, plant)]))
    with tempfile.TemporaryDirectory(prefix="drivetrain-fuzz-") as folder:
        root = folder if program.saving is not None else ""
        try:
            plain = expected if program.resume is None else interpret(replace(program, resume=None))
            outcomes = on(run, program.ranks * program.tensor_parallel, program, root, False, plant)
            verdict = Verdict(differences(program, plain, outcomes), any_refused(outcomes))
            failed = any(one.error for one in outcomes)
            if not verdict.found and not failed and expected.saved_after >= 0:
                if program.resume is not None:
                    outcomes = on(run, program.resume.ranks, program, root, True, plant)
                    failed = any(one.error for one in outcomes)
                    verdict = of_resumed(program, expected, outcomes)
                elif program.evaluation is not None:
                    verdict = of_evaluation(program, expected, root, plant)
            if verdict.found and not failed and not is_stable(program, expected):
                verdict.found = []
            return verdict
        except DrivetrainError as error:
            return Verdict([f"ranks failed: {error}"])


def of_resumed(program: Program, expected: Outcome, outcomes: list[Outcome]) -> Verdict:
    if expected.saved_at_end and all("nothing is left to train" in one.text for one in outcomes):
        return Verdict([], refused=True)
    found = differences(program, expected, outcomes, resumed=True)
    return Verdict([f"resumed: {what}" for what in found], any_refused(outcomes))


def any_refused(outcomes: list[Outcome]) -> bool:
    return any(one.error in DRIVETRAIN_ERRORS for one in outcomes)


def of_evaluation(program: Program, expected: Outcome, root: str, plant: str) -> Verdict:
    plan = program.evaluation
    assert plan is not None
    assert expected.evaluated is not None
    held = on(evaluate, plan.ranks, program, root, plant)
    found = evaluation_differences(program, expected.evaluated, held)
    return Verdict([f"evaluated: {what}" for what in found], any(one.refused for one in held))


def is_stable(program: Program, expected: Outcome) -> bool:
    """Return whether results can be compared: a rounding-sized change of the initial weights hardly changes them."""
    if expected.error:
        return True
    tolerance = TOLERANCES[program.precision] / 4
    return not any(
        tensor_differences(expected.weights, interpret(program, nudged=seed).weights, tolerance) for seed in range(3)
    )
