"""Runs a script in a process that has already imported torch, which saves three seconds over `python script.py`.

For scripts whose own processes are not under test. A script that starts itself again for other ranks, or ends with an
error, is run by Python itself.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from drivetrain.launchers.function_launcher import PRELOAD as TORCH
from worlds import preloaded

_LIMIT = 150.0  # seconds


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


def _main(path: str, arguments: Sequence[str], folder: str, printed: str, variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    # as in a new process; otherwise data-loading workers import torch
    multiprocessing.set_start_method(None, force=True)
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).parent)
    with open(printed, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    runpy.run_path(path, run_name="__main__")
