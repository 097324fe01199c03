"""What a step costs in instructions of the processor, counted by Valgrind: other work on the machine changes nothing.

    python -m benchmarks.instructions

An instruction is no unit of time, but the same loop takes the same number of them in every run, to some parts in a
thousand: a hundredth that the clock cannot tell is plain here. Valgrind runs a program some fifty times slower, and as
on a processor with AVX2.
"""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.bytecodes import bytecodes_a_step
from benchmarks.peers import OURS, PEERS, versions
from benchmarks.slopes import Loop
from benchmarks.step import RAW, Key, loops_of
from benchmarks.work import WORKS

NAMES = [name for name, peer in PEERS.items() if not peer.slow]
"""The frameworks that are counted: the others' additions the clock tells well enough."""
STEPS = {"linear": (100, 500), "mlp": (100, 300)}
"""By network, the two numbers of steps whose difference counts; what is logged is brought to the host every 50."""
_RUNS = 2
"""Of each number; the smaller count stands. What a directory's change makes the import system do is in the other."""


def table() -> list[str]:
    """The tables' lines.

    Raises:
        SystemExit: Valgrind is not installed, or failed.
    """
    counts, steps = _counted(), bytecodes_by_function()
    lines = [versions(), f"{_valgrind_version()}. Thousands of instructions.", ""]
    titles = ["", "", "", "a step", "over raw", "ratio", "of ours"]
    lines += [_row(*titles), "|---" * len(titles) + "|"]
    for net in STEPS:
        base = counts[net, (RAW, "")]
        for key in _keys(net):
            count, ours = counts[net, key], counts.get((net, (OURS, key[1])), base) - base
            name = f"**{key[0]}**" if key[0] == OURS else key[0]
            cells = [f"{count / 1000:,.1f}"]
            if key[0] != RAW:
                cells += [f"{(count - base) / 1000:,.1f}", f"{count / base:.4f}", f"{(count - base) / ours:.1f}"]
            lines.append(_row(net, key[1], name, *cells, *[""] * (len(titles) - 3 - len(cells))))
    lines += ["", _row("bytecodes of a bare step of `linear`, over raw", ""), "|---|---|"]
    return [*lines, *(_row(f"`{name}`", f"{count:.0f}") for name, count in steps.items())]


def bytecodes_by_function() -> dict[str, float]:
    """How many bytecodes our bare step of the smallest network adds to the raw loop, by function, and in all."""
    loops = loops_of(WORKS["linear"], [OURS])
    raw, ours = (bytecodes_a_step(loops[key]) for key in ((RAW, ""), (OURS, "bare")))
    # The loop itself is another function here than there.
    more = {name: ours.get(name, 0.0) - raw.get(name, 0.0) for name in ours | raw}
    largest = dict(sorted(more.items(), key=lambda item: -item[1]))
    return {name: count for name, count in largest.items() if abs(count) >= 1} | {"in all": sum(more.values())}


def _keys(net: str) -> list[Key]:
    """What is counted: a typical run is not, since its bar goes by the clock, and of larger networks ours, bare."""
    every = [key for key in loops_of(WORKS[net], NAMES) if key[1] != "typical"]
    return every if net == "linear" else [key for key in every if key in ((RAW, ""), (OURS, "bare"))]


def _counted() -> dict[tuple[str, Key], float]:
    """Instructions of a step."""
    if shutil.which("valgrind") is None:
        raise SystemExit("The instructions are counted by valgrind, which is not installed: apt-get install valgrind")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "counts"
        options = ["--tool=callgrind", "--quiet", "--collect-atstart=no", f"--callgrind-out-file={file}"]
        subprocess.run(["valgrind", *options, sys.executable, "-m", "benchmarks.instructions"], check=True)
        return _read(file)


def _read(file: Path) -> dict[tuple[str, Key], float]:
    totals = [_total(file.with_suffix(f".{number}")) for number in range(1, 1 + sum(map(_runs, STEPS)))]
    counts: dict[tuple[str, Key], float] = {}
    taken = iter(totals)
    for net, (short, long) in STEPS.items():
        for key in _keys(net):
            few, many = (min(next(taken) for _ in range(_RUNS)) for _ in (short, long))
            counts[net, key] = (many - few) / (long - short)
    return counts


def _runs(net: str) -> int:
    return len(_keys(net)) * 2 * _RUNS


def _total(file: Path) -> int:
    (line,) = (line for line in file.read_text().splitlines() if line.startswith("totals: "))
    return int(line.split()[1])


def _run(loops: Mapping[Key, Loop], keys: Sequence[Key], counts: tuple[int, int]) -> None:
    """What Valgrind looks at: every loop, each number of steps twice, a file each."""
    for key in keys:
        loops[key](counts[0])  # what is done and imported once
        for steps in counts:
            for _ in range(_RUNS):
                gc.collect()
                gc.freeze()
                torch._C._valgrind_toggle()
                loops[key](steps)
                torch._C._valgrind_toggle_and_dump_stats()


def _valgrind_version() -> str:
    return subprocess.run(["valgrind", "--version"], check=True, capture_output=True, text=True).stdout.strip()


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, steps in STEPS.items():
        _run(loops_of(WORKS[name], NAMES), _keys(name), steps)
