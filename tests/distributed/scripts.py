"""Runs scripts as a user would, and reads the output of their ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = str(Path(__file__).parent)

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

HEAD = """
import os, pathlib, signal, sys, time
import torch
from small_runs import Regression, failing, global_batches, loader, quiet, train_by_hand, weights

RANK = int(os.environ.get("RANK", "0"))

def say(*words):
    with open(os.environ["REPORTED"], "a") as file:
        file.write(" ".join([str(RANK), *map(str, words)]) + "\\n")

class Model(Regression):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))
    test_step = validation_step
    def predict_step(self, batch, batch_idx):
        return batch[0][:, 0].tolist()
"""


# A rank of torchrun, or of a script that starts itself again, forks once per case, so that torch is imported once.
CASES = """
import os, sys
import torch, torch._dynamo

CASE = os.environ.get("CASE")
if CASE is None:
    worst = 0
    for number, case in enumerate({cases!r}):
        child = os.fork()
        if child == 0:
            # The rest of the script is this process's, and of those that it starts, to their ends.
            os.chdir(str(number))
            CASE = os.environ["CASE"] = case
            os.environ["REPORTED"] = os.path.abspath("reported")
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # what torchrun's ranks meet by is of this case
            for stream, name in ((1, "out"), (2, "errors")):
                file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(file, stream)
                os.close(file)
            break
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with open(f"{{number}}/codes", "a") as file:
            file.write(f"{{code}}\\n")
    else:
        sys.exit(0)
"""


def starter(folder: Path, *ranks: dict[str, str]) -> tuple[str, ...]:
    """Return a command like srun: it starts ``python`` with each of these variables, and ends no rank for another."""
    start = "max(abs(one.wait()) for one in [subprocess.Popen(sys.argv[1:], env=os.environ | more) for more in ranks])"
    script = folder / "start.py"
    script.write_text(f"import os, subprocess, sys\nranks = {ranks!r}\nsys.exit({start})")
    return sys.executable, str(script)


@dataclass
class Run:
    """The result of a script, and the folder in which it ran."""

    code: int
    out: str
    errors: str
    reported: list[str]
    folder: Path


def run_cases(
    folder: Path,
    body: str,
    cases: Sequence[str],
    *command: str,
    head: str = HEAD,
    starter: Sequence[str] = (),
    limit: float = 120,
) -> dict[str, Run]:
    """Run ``head`` and ``body`` by ``*starter python *command``, once for each ``CASE``.

    The code is the largest of the ranks' codes. Lines that the ranks ``say`` are sorted.
    """
    script = folder / "script.py"
    script.write_text(CASES.format(cases=tuple(cases)) + head + textwrap.dedent(body))
    for number in range(len(cases)):
        (folder / str(number)).mkdir()
        (folder / str(number) / "reported").touch()
    # Unbuffered Python writes tracebacks in fragments of lines, and those of several ranks would mix.
    kept_out = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED")
    variables = {name: value for name, value in os.environ.items() if name not in kept_out}
    variables["PYTHONPATH"] = os.pathsep.join([HERE, str(folder), *sys.path])
    line = [*starter, sys.executable, *command, str(script)]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=limit, cwd=folder, check=False, env=variables)
    assert ended.returncode == 0, ended.stderr
    return {case: _case(folder / str(number)) for number, case in enumerate(cases)}


def _case(folder: Path) -> Run:
    codes = [int(code) for code in (folder / "codes").read_text().split()]
    out, errors, reported = ((folder / name).read_text() for name in ("out", "errors", "reported"))
    return Run(max(codes, key=abs), out, errors, sorted(reported.splitlines()), folder)
