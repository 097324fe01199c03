"""Runs everything that the suite requires of a strategy in one start of its processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import parity_device
import torch.distributed as dist
from parity_cases import BY_NAME, CASES, OVERFLOW, SEVERAL, Case
from parity_engine import Record, train_all
from parity_evaluation import Findings, observe
from parity_strategies import Candidate, Job

from worlds import on_ranks

PRECISIONS = ("64-true", "bf16-mixed", "16-mixed", "bf16-true")
PRECISION_CASES = ("plain", "clipped by norm", "token-weighted")
"""Between them they clip, accumulate, weight by tokens and tie weights; other features do not depend on precisions."""


def jobs_of(candidate: Candidate, ranks: int) -> list[Job]:
    """Return all jobs of ``candidate`` on ``ranks`` ranks, including refusals."""
    cases = [case for case in CASES if not candidate.only or case.name in candidate.only]
    if ranks != candidate.ranks:
        return [(case.name, "32-true") for case in cases if case.four_ranks and case.name not in candidate.refuses]
    jobs = [(case.name, "32-true") for case in cases]
    if not candidate.only:
        refused = candidate.refuses_precisions
        jobs += [("plain", precision) for precision in refused]
        jobs += [(name, precision) for precision in PRECISIONS if precision not in refused for name in PRECISION_CASES]
        jobs.append((SEVERAL.name, "bf16-mixed"))
        if candidate.zero:  # whose parameters are in half precision, with statistics in float32
            jobs.append(("BatchNorm", "bf16-mixed"))
        if "16-mixed" not in refused:
            jobs.append((OVERFLOW.name, "16-mixed"))
        if ranks // candidate.tensor < 4 and "16-mixed" not in refused:
            # With two samples per rank the first step overflows in one optimizer's gradients: there torch's scaler, and
            # therefore the reference, steps the other one, whereas the engine makes or skips a step as a whole.
            jobs.append((SEVERAL.name, "16-mixed"))
    if parity_device.DEVICE != "cpu" and candidate.name == "ddp":
        jobs = [job for job in jobs if job[0] != "sparse embedding"]  # NCCL cannot reduce sparse gradients
    return [job for job in jobs if not parity_device.CASES or job[0] in parity_device.CASES]


@dataclass
class Results:
    """The observations of all ranks."""

    records: dict[Job, list[Record]]
    findings: list[Findings]


def run(candidate: Candidate, ranks: int) -> Results:
    """Run every job of ``candidate``, in this process if it needs only one."""
    # Refusals come first: they must not affect later runs of the same processes (G-07).
    jobs = sorted(jobs_of(candidate, ranks), key=lambda job: candidate.refusal(job) is None)
    looks = not candidate.only
    if parity_device.DEVICE != "cpu":
        by_rank = on_ranks(_work_on_device, ranks, candidate, ranks, jobs, process_group=None, timeout=500)
    elif ranks == 1:
        by_rank = [_work(candidate, 1, jobs, looks)]
    else:
        by_rank = on_ranks(_work, ranks, candidate, ranks, jobs, looks, timeout=500)
    records = {job: [one[number] for one, _ in by_rank] for number, job in enumerate(jobs)}
    return Results(records, [findings for _, findings in by_rank])


def _work(candidate: Candidate, ranks: int, jobs: Sequence[Job], looks: bool) -> tuple[list[Record], Findings]:
    rank = dist.get_rank() if ranks > 1 else 0
    findings = observe(candidate, ranks, rank) if looks else Findings()
    return train_all(jobs, candidate, rank, ranks), findings


def _work_on_device(candidate: Candidate, ranks: int, jobs: Sequence[Job]) -> tuple[list[Record], Findings]:
    rank = int(os.environ["RANK"])
    with parity_device.group(rank):
        return train_all(jobs, candidate, rank, ranks), Findings()


def case_of(job: Job) -> Case:
    return BY_NAME[job[0]]
