"""Runs a script as its user would, and reads what its ranks said."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = str(Path(__file__).parent)

HEAD = """
import os, pathlib, signal, sys, time
import torch
from small_runs import Regression, failing, global_batches, loader, quiet, train_by_hand, weights

RANK = int(os.environ.get("RANK", "0"))

def say(*words):
    with open(os.environ["SAID"], "a") as file:
        file.write(" ".join([str(RANK), *map(str, words)]) + "\\n")

class Model(Regression):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))
    test_step = validation_step
    def predict_step(self, batch, batch_idx):
        return batch[0][:, 0].tolist()
"""


@dataclass
class Run:
    """How a script ended."""

    code: int
    out: str
    errors: str
    seconds: float
    said: list[str] = field(default_factory=list)


def run_script(folder: Path, body: str, *command: str, starter: Sequence[str] = (), limit: float = 90) -> Run:
    """Run ``body`` under Python, or ``python *command``, in ``folder``; what it says comes back sorted.

    A ``starter``, such as mpirun with its options, stands before ``python``.
    """
    script, said = folder / "script.py", folder / "said"
    script.write_text(HEAD + textwrap.dedent(body))
    said.write_text("")
    began = time.monotonic()
    # Unbuffered, Python writes an error's traceback in pieces of lines, and those of several ranks mix.
    kept_out = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED")
    variables = {name: value for name, value in os.environ.items() if name not in kept_out}
    ended = subprocess.run(
        [*starter, sys.executable, *command, str(script)],
        capture_output=True,
        text=True,
        timeout=limit,
        cwd=folder,
        check=False,
        env=variables | {"PYTHONPATH": os.pathsep.join([HERE, *sys.path]), "SAID": str(said)},
    )
    seconds = time.monotonic() - began
    return Run(ended.returncode, ended.stdout, ended.stderr, seconds, sorted(said.read_text().splitlines()))
