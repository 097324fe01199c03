"""Runs all that the suite requires of a strategy in one start of its processes, and the reference of each job."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from functools import cache

import parity_device
import torch.distributed as dist
from parity_evaluation import Findings, observe
from parity_strategies import Candidate, Job

from oracle.engine import run as run_under_fit
from oracle.interpreter import interpret
from oracle.outcome import Outcome
from oracle.program import Program
from worlds import on_ranks


@dataclass
class Results:
    outcomes: dict[Job, list[Outcome]]  # of each job's run
    resumed: dict[Job, list[Outcome]]  # of the runs that resumed, for jobs that resume
    findings: list[Findings]  # what was evaluated


def run(candidate: Candidate, ranks: int, jobs: list[Job]) -> Results:
    programs = [candidate.program(job, ranks) for job in jobs]
    with tempfile.TemporaryDirectory(prefix="drivetrain-parity-") as folder:
        if parity_device.DEVICE != "cpu":
            of_ranks = on_ranks(_on_device, ranks, programs, folder, process_group=None, timeout=500)
        elif ranks == 1:
            of_ranks = [_on_rank(candidate, 1, programs, folder)]
        else:
            of_ranks = on_ranks(_on_rank, ranks, candidate, ranks, programs, folder, timeout=500)
    by_job = {job: [one[at] for one, _ in of_ranks] for at, job in enumerate(jobs)}
    outcomes = {job: [first for first, _ in pairs] for job, pairs in by_job.items()}
    resumed = {job: [second for _, second in pairs if second is not None] for job, pairs in by_job.items()}
    return Results(outcomes, resumed, [findings for _, findings in of_ranks])


Pairs = list[tuple[Outcome, Outcome | None]]
"""Of each program the outcome of its run, and of the one that resumed."""


def _on_rank(candidate: Candidate, ranks: int, programs: list[Program], folder: str) -> tuple[Pairs, Findings]:
    findings = Findings() if candidate.only else observe(candidate, ranks, dist.get_rank() if ranks > 1 else 0)
    return [_run(program, f"{folder}/{at}") for at, program in enumerate(programs)], findings


def _on_device(programs: list[Program], folder: str) -> tuple[Pairs, Findings]:
    with parity_device.group(int(os.environ["RANK"])):
        return [_run(program, f"{folder}/{at}") for at, program in enumerate(programs)], Findings()


def _run(program: Program, root: str) -> tuple[Outcome, Outcome | None]:
    if program.resume is None:
        return run_under_fit(program, "", resumed=False), None
    first = run_under_fit(program, root, resumed=False)
    return first, None if first.error else run_under_fit(program, root, resumed=True)


def reference(program: Program) -> Outcome:
    """Return the expected results of a program, computed once for all strategies with the same numbers."""
    strategy = program.strategy
    if not strategy.startswith("deepspeed"):
        strategy = "ddp" if strategy.startswith("ddp") and program.net.norm == "batch" else "single_device"
    elif program.precision == "32-true":
        strategy = "deepspeed_stage_1"
    resume = program.resume and replace(program.resume, strategy=strategy)
    return _interpreted(replace(program, strategy=strategy, resume=resume))


_interpreted = cache(interpret)
