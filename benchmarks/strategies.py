"""What a step costs on two ranks, over hand-written code on the same backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from benchmarks.by_engine import train_by_engine
from benchmarks.by_hand import WRAPS, train_by_hand
from benchmarks.calls import python_calls_a_step
from benchmarks.deepspeed_by_hand import STAGES, train_by_deepspeed, zero
from benchmarks.nets import GPT
from benchmarks.slopes import Loop, Slopes, cells, time_loops
from benchmarks.traffic import a_step, in_words
from drivetrain.testing import run_distributed

RANKS = 2
SHORT, LONG = 20, 220


class Counts(NamedTuple):
    """What of a step is the same in every run."""

    calls: float
    collectives: dict[str, float]
    sent: float


def loops_of(strategy: str, net: Callable[[], GPT] = GPT) -> dict[str, Loop]:
    """What is compared, on one rank."""
    if strategy in STAGES:
        return {
            "by hand": lambda steps: train_by_deepspeed(STAGES[strategy], steps, net),
            "engine": lambda steps: train_by_engine(zero(strategy), steps, net=net),
        }
    return {
        "by hand": lambda steps: train_by_hand(strategy, steps, net),
        "engine": lambda steps: train_by_engine(strategy, steps, net=net),
    }


def measured(strategy: str, rounds: int) -> tuple[dict[str, Slopes], dict[str, Counts]]:
    """On one rank: what a step takes, and what it does."""
    loops = loops_of(strategy)
    # These runs come first, so that what a process does once is in nobody's time.
    counts = {name: Counts(python_calls_a_step(loop), *a_step(loop)) for name, loop in loops.items()}
    return time_loops(loops, SHORT, LONG, rounds, dist.barrier), counts


def table(rounds: int) -> list[str]:
    """The table's lines; processes of one thread each, on gloo."""
    lines = [
        f"{RANKS} processes, {rounds} rounds, slopes between {SHORT} and {LONG} steps; median (minimum to maximum).",
        "",
        "| Strategy | Loop | ms a step | ratio | processor, ms | ratio | Python calls | collectives | KiB sent |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for strategy in (*WRAPS, *STAGES):
        slopes, counts = run_distributed(measured, RANKS, strategy, rounds, timeout=3600.0)[0]
        for name, slope in slopes.items():
            count = counts[name]
            row = [f"`{strategy}`", name, *cells(slope, slopes["by hand"], 1e-3, 1)]
            row += [f"{count.calls:,.0f}", in_words(count.collectives), f"{count.sent / 1024:,.1f}"]
            lines.append(f"| {' | '.join(row)} |")
    return lines
