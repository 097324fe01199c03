"""The cost of a step on two ranks, compared with hand-written code on the same backend."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch.utils.data import TensorDataset

from benchmarks.by_engine import train_by_engine
from benchmarks.by_hand import WRAPS, train_by_hand
from benchmarks.calls import python_calls_a_step
from benchmarks.deepspeed_by_hand import STAGES, train_by_deepspeed, zero
from benchmarks.nets import BATCH, GPT, Data
from benchmarks.slopes import Loop, Slopes, cells
from benchmarks.traffic import a_step, in_words
from benchmarks.turns import Turns
from drivetrain.testing import run_distributed

RANKS = 2
TURN, TURNS = 10, 15
"""Steps of a turn, and turns for each round that is asked for."""

AGAIN = "by hand, again"
"""Tells how far apart two loops come out that are the same."""


class Counts(NamedTuple):
    """The counts of a step, which are the same in every run."""

    calls: float
    collectives: dict[str, float]
    sent: float


def loops_of(strategy: str, net: Callable[[], GPT] = GPT, data: Data = TensorDataset) -> dict[str, Loop]:
    """Return the compared loops, on one rank."""
    if strategy in STAGES:
        return {
            "by hand": lambda steps: train_by_deepspeed(STAGES[strategy], steps, net, data),
            "engine": lambda steps: train_by_engine(zero(strategy), steps, net=net, data=data),
        }
    return {
        "by hand": lambda steps: train_by_hand(strategy, steps, net, data),
        "engine": lambda steps: train_by_engine(strategy, steps, net=net, data=data),
    }


def measured(strategy: str, rounds: int) -> tuple[dict[str, Slopes], dict[str, Counts]]:
    """Runs on one rank: return the time and the counts of a step."""
    # These runs come first, so that one-time work of the process is not timed.
    counts = {name: Counts(python_calls_a_step(loop), *a_step(loop)) for name, loop in loops_of(strategy).items()}
    counts[AGAIN] = counts["by hand"]
    turns = Turns(TURN, BATCH)
    loops = loops_of(strategy, data=turns.data)
    steps = TURN * (rounds * TURNS + 2)  # the first and the last are not counted
    runs = {name: partial(loop, steps) for name, loop in {**loops, AGAIN: loops["by hand"]}.items()}
    gc.collect()
    gc.freeze()
    return turns.run(runs), counts


def table(rounds: int) -> list[str]:
    """Return the lines of the table; each process has one thread and uses gloo."""
    lines = [
        f"{RANKS} processes; the loops take turns of {TURN} steps, {rounds * TURNS} each; median (minimum to maximum).",
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
