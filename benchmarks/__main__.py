"""Runs the benchmarks against hand-written PyTorch, raw disk speed and other frameworks: `make bench`.

Rounds are interleaved, and the cost of a step is the slope between two numbers of steps, which removes start-up time.
All loops of a table do the same work; a checksum of the trained weights verifies this.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import checkpoint, data, instructions, memory, profile, results, scale, start, step, strategies
from benchmarks.pages import put
from benchmarks.peers import PEERS
from benchmarks.work import WORKS

ROUNDS = 7
DOCS = Path(__file__).parents[1] / "docs"
BENCHMARKS = DOCS / "benchmarks"
TABLES: dict[str, tuple[Callable[..., list[str]], Path]] = {
    "step": (step.table, BENCHMARKS / "one-process.md"),
    "instructions": (lambda rounds: instructions.table(), BENCHMARKS / "instructions.md"),
    "profile": (profile.table, BENCHMARKS / "where-a-step-goes.md"),
    "strategies": (strategies.table, BENCHMARKS / "two-processes.md"),
    "start": (start.table, BENCHMARKS / "starting.md"),
    "data": (data.table, BENCHMARKS / "reading-data.md"),
    "scale": (scale.table, BENCHMARKS / "many-ranks.md"),
    "checkpoint": (checkpoint.table, BENCHMARKS / "saving-and-loading.md"),
    "memory": (lambda rounds: memory.table(), DOCS / "strategies.md"),
}
"""What prints each table, given how many rounds to run, and the page where it stands."""
COUNTED = {"instructions", "memory"}
"""The tables of what is the same in every run, for which rounds mean nothing."""


def conditions(arguments: str) -> str:
    """Return the device, versions and command."""
    known = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", known.read_text()) if known.exists() else None
    processor = f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f'{processor}, {versions}; `make bench ARGS="{arguments}"`. One thread a process.'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}; default: all")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="interleaved rounds of each loop")
    parser.add_argument("--write", action="store_true", help="put the tables, and the pictures, into docs/")
    parser.add_argument("--nets", type=_names, help=f"step: of {', '.join(WORKS)}, with commas; default: all")
    parser.add_argument("--loops", type=_names, help=f"step: of {', '.join(PEERS)}, with commas; default: all")
    options = parser.parse_args()
    unknown = set(options.tables) - TABLES.keys()
    if unknown:
        parser.error(f"no table {', '.join(unknown)}; there are {', '.join(TABLES)}")
    if unknown := {*(options.nets or ())} - WORKS.keys() | {*(options.loops or ())} - PEERS.keys():
        parser.error(f"no net or loop {', '.join(unknown)}; there are {', '.join([*WORKS, *PEERS])}")
    further: dict[str, dict[str, Any]] = {
        "step": {"nets": options.nets, "names": options.loops},
        "profile": {"pictures": DOCS / "images" if options.write else None},
    }
    for name in options.tables or TABLES:
        table, page = TABLES[name]
        arguments = name if name in COUNTED else f"{name} --rounds {options.rounds}"
        for option in ("nets", "loops"):
            if name == "step" and (chosen := getattr(options, option)):
                arguments += f" --{option} '{','.join(chosen)}'"
        text = "\n".join([conditions(arguments), *table(options.rounds, **further.get(name, {}))])
        print(f"{text}\n", flush=True)
        if options.write:
            put(name, text, page)
            results.write(DOCS)


def _names(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main()
