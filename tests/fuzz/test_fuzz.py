"""A fixed set of drawn programs, past findings, and a check that the comparison can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fuzz.examples import EXAMPLES
from fuzz.search import script, search
from oracle.check import check, judge
from oracle.compare import differences
from oracle.interpreter import interpret
from oracle.program import Log, Net, Program

COUNT, SEED = 60, 16


def test_a_fixed_set_of_programs_equals_the_loop() -> None:
    one = search(COUNT, SEED)
    assert one is None, script(*one)


@pytest.mark.parametrize("program", [pytest.param(one, id=name) for name, one in EXAMPLES.items()])
def test_past_findings_are_fixed(program: Program) -> None:
    check(program)


def test_a_printed_script_rebuilds_its_program() -> None:
    program = Program(ranks=2, strategy="ddp", net=Net(dropout=0.3), logs=(Log(what="number"), Log()))
    names: dict[str, object] = {}
    exec(compile(script(program, 'it said """no"""').split("if __name__")[0], "script", "exec"), names)
    assert names["PROGRAM"] == program


def test_the_comparison_detects_another_program() -> None:
    program = Program(net=Net(dropout=0.3), epochs=2, logs=(Log(),))
    expected = interpret(program)
    assert judge(program).found == []
    for other in (
        replace(program, seed=1),
        replace(program, net=Net(dropout=0.31)),
        replace(program, accumulate=2),
        replace(program, epochs=1),
    ):
        assert differences(program, expected, [interpret(other)])
    bias = expected.weights["head.bias"]
    for changed in (bias + 1e-3, bias.to(torch.float64)):
        doctored = replace(expected, weights={**expected.weights, "head.bias": changed})
        assert differences(program, expected, [doctored])
