"""Runs a script in a process that has imported torch, or by Python if it starts itself again or ends with an error."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.launchers.function_launcher import PRELOAD as TORCH
from worlds import preloaded

_LIMIT = 150.0  # seconds

# What a line contains if it is a warning, except those of torch's anomaly detection, or advice on settings.
_HINT = re.compile(
    r"unseeded|is not seeded|does not validate|stays sharded|"
    r"UserWarning: (?!Error detected in)|RuntimeWarning: |^\[drivetrain warning\]"
)


def hints_in(printed: str) -> list[str]:
    """Return the lines that are warnings or advice of the framework."""
    return [line for line in printed.splitlines() if _HINT.search(line)]


def run_script(path: Path, *arguments: str, folder: Path) -> tuple[int, str]:
    """Run a script in ``folder`` as ``python path *arguments`` would; return its exit code and all output."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*TORCH, *preloaded()])
    printed = folder / f"{path.stem}.printed"
    process = context.Process(target=_main, args=(str(path), arguments, str(folder), str(printed), dict(os.environ)))
    process.start()
    process.join(_LIMIT)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode or 0, printed.read_text()


def run_program(path: Path, *arguments: str, folder: Path) -> tuple[int, str]:
    """Run ``python path *arguments`` in ``folder``; return its exit code and all output."""
    command = [sys.executable, str(path), *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    merged: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": _LIMIT}
    done = subprocess.run(command, cwd=folder, env=variables, check=False, **merged)
    return done.returncode, done.stdout


def _main(path: str, arguments: Sequence[str], folder: str, printed: str, variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    # as in a new process; otherwise data-loading workers import torch
    multiprocessing.set_start_method(None, force=True)
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).parent)
    logging.setLogRecordFactory(_marked_record)
    with open(printed, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    runpy.run_path(path, run_name="__main__")


def _marked_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    """Mark warnings of the framework, which the console shows without their level."""
    record = logging.LogRecord(*args, **kwargs)
    if record.name == "drivetrain" and record.levelno >= logging.WARNING:
        record.msg = f"[drivetrain warning] {record.msg}"
    return record
