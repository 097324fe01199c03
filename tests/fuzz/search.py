"""Draws and runs programs, and prints one as a script that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Flaky

from fuzz.draw import STRATEGIES, programs
from oracle.check import Difference, check
from oracle.program import Program


def search(
    count: int,
    seed: int,
    strategies: Sequence[str] = STRATEGIES,
    shrinks: bool = True,
    attempt: Callable[[Program], object] = check,
) -> tuple[Program, str] | None:
    """Try ``count`` programs; return the first failing one, shrunk, with its message, or None."""
    failed: list[tuple[Program, str]] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(strategies))
    def one(program: Program) -> None:
        try:
            attempt(program)
        except Difference as error:
            failed.append((program, str(error)))
            raise

    try:
        one()
    except Difference:
        return failed[-1]
    except Flaky:
        program, text = failed[-1]
        return program, f"{text}\n\nIt came out right when it was run again."
    return None


_SCRIPT = '''\
"""{text}

Run it from the repository's root: .venv/bin/python program.py
"""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = ["tests"]

from oracle.check import check
from oracle.program import *
from worlds import close_worlds

PROGRAM = {program}

if __name__ == "__main__":
    try:
        check(PROGRAM)
        print("Nothing differs.")
    finally:
        close_worlds()
'''


def script(program: Program, text: str) -> str:
    """Return the program as a script; ``text`` describes the finding."""
    escaped = text.replace("\\", "\\\\").replace('"""', "'''")
    return _SCRIPT.format(text=escaped, program=program)
