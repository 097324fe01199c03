"""Where a step spends its time, in drivetrain and in Lightning, as a table and as pictures."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.bars import Bar, drawn
from benchmarks.parts import PARTS
from benchmarks.peers import OURS, installed, versions
from benchmarks.sampling import parts_of_a_step
from benchmarks.slopes import Loop, row, time_loops
from benchmarks.work import WAYS, WORKS, Work, raw

NETS = ("linear", "mlp")
SHOWN = ("bare", "typical")
SAMPLED = 3  # factor between sampled and timed steps


class Parts(NamedTuple):
    """Microseconds of a step: the total, and each part."""

    whole: float
    parts: dict[str, float]


def table(rounds: int, pictures: Path | None = None) -> list[str]:
    """The table's lines; one thread.

    Args:
        rounds: how often each loop is timed.
        pictures: the folder to draw into; None draws nothing.
    """
    torch.set_num_threads(1)
    titles = ["", "", "us a step", *PARTS]
    lines = [versions(), "", row(*titles), "|---" * len(titles) + "|"]
    for name in NETS:
        found = _found(WORKS[name], rounds)
        for label, (whole, parts) in found.items():
            cells = [f"{parts.get(part, 0.0):.1f}" if parts.get(part) else "" for part in PARTS]
            lines.append(row(name, label, f"{whole:.0f}", *cells))
        if pictures is not None:
            title = f"Where a step of the network “{name}” goes, in microseconds"
            pictures.mkdir(exist_ok=True)
            bars = [Bar(label, parts) for label, (_, parts) in found.items()]
            (pictures / f"step-{name}.svg").write_text(drawn(title, bars, PARTS), encoding="utf-8")
    return lines


def _found(work: Work, rounds: int) -> dict[str, Parts]:
    frameworks = {name: train for name, train in installed().items() if name in (OURS, "Lightning")}
    loops: dict[str, Loop] = {"raw loop": partial(raw, work)}
    for way in WAYS:
        if way.name in SHOWN:
            loops |= {f"{name}, {way.name}": partial(train, work, way) for name, train in frameworks.items()}
    slopes = time_loops(loops, work.short, work.long, rounds)
    found = {}
    for label, loop in loops.items():
        whole = 1e6 * statistics.median(slopes[label].busy)
        shares = parts_of_a_step(loop, work.short, SAMPLED * work.long)
        found[label] = Parts(whole, {part: whole * shares.get(part, 0.0) for part in PARTS})
    return found
