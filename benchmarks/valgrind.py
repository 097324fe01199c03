"""Processor instructions of a step, counted by Valgrind in a process of its own.

Valgrind runs python -m benchmarks.valgrind NAMES SHORT LONG MODULE FUNCTION [ARGUMENT ...], which runs each loop that
the function returns, for both numbers of steps, and writes the loops' names into a file.
"""

from __future__ import annotations

import gc
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.slopes import Loop

_RUNS = 2
"""Of each number of steps; the smaller count stands. What is done now and then is in the other."""


def instructions_a_step(
    loops: Callable[..., Mapping[str, Loop]], steps: tuple[int, int], *given: str
) -> dict[str, float]:
    """Return the instructions per step of each loop, over all threads; start-up and end are removed.

    Args:
        loops: a function of a module; it is called with ``given`` in the other process.
        steps: the two numbers of steps whose difference counts.
        given: its arguments.

    Raises:
        SystemExit: Valgrind is not installed.
    """
    if shutil.which("valgrind") is None:
        raise SystemExit("Instructions are counted by valgrind, which is not installed: apt-get install valgrind")
    short, long = steps
    with tempfile.TemporaryDirectory() as folder:
        file, names = Path(folder) / "counts", Path(folder) / "names"
        options = ["--tool=callgrind", "--quiet", "--collect-atstart=no", f"--callgrind-out-file={file}"]
        what = [str(names), str(short), str(long), loops.__module__, loops.__name__, *given]
        subprocess.run(["valgrind", *options, sys.executable, "-m", "benchmarks.valgrind", *what], check=True)
        found, numbers = {}, iter(range(1, 10**6))
        for name in json.loads(names.read_text()):
            few, many = (min(_total(file.with_suffix(f".{next(numbers)}")) for _ in range(_RUNS)) for _ in steps)
            found[name] = (many - few) / (long - short)
    return found


def version() -> str:
    """Return Valgrind's version."""
    return subprocess.run(["valgrind", "--version"], check=True, capture_output=True, text=True).stdout.strip()


def _total(file: Path) -> int:
    (line,) = (line for line in file.read_text().splitlines() if line.startswith("totals: "))
    return int(line.split()[1])


def _run(loops: Mapping[str, Loop], steps: tuple[int, int], names: Path) -> None:
    for loop in loops.values():
        loop(steps[0])  # warm-up: one-time work and imports
        for count in steps:
            for _ in range(_RUNS):
                gc.collect()
                gc.freeze()
                torch._C._valgrind_toggle()
                loop(count)
                torch._C._valgrind_toggle_and_dump_stats()
    names.write_text(json.dumps(list(loops)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    path, few, many, module, function, *rest = sys.argv[1:]
    _run(getattr(importlib.import_module(module), function)(*rest), (int(few), int(many)), Path(path))
