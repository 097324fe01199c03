"""Under torchrun --max-restarts a run resumes by itself after a rank was killed: G-02."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from drawing_run import train

from drivetrain.testing import requires_linux, run_distributed

_SCRIPT = """
import json, os, signal, sys, torch
from pathlib import Path
sys.path.insert(0, {here!r})
from drawing_run import train

torch.set_num_threads(1)
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
folder = Path(sys.argv[1])

def tell(what, *values):
    if what == "from":
        with open(folder.with_suffix(".log"), "a") as log:
            log.write(f"{{rank}} {{restart}} {{values[0]}}\\n")
    if restart == 0 and rank == 1 and what == "step" and values[0] == 3:
        os.kill(os.getpid(), signal.SIGKILL)

result = train(folder, "ddp", 1, False, tell)
folder.with_suffix(f".{{rank}}").write_text(json.dumps(result))
"""


def _undisturbed(folder: Path) -> Any:
    return train(folder, "ddp", 1, False, lambda *words: None)


@requires_linux()
def test_a_killed_worker_is_restarted_and_loses_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.format(here=str(Path(__file__).parent)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "--monitor-interval", "0.1", str(script), str(tmp_path / "kill")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    undisturbed = run_distributed(_undisturbed, 2, tmp_path / "undisturbed", process_group=None)
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    starts = sorted((tmp_path / "kill.log").read_text().split("\n"))
    # Rank 1 is killed in its third step: the next start resumes from the last complete checkpoint.
    assert [line.split()[1:] for line in starts if line.startswith("0")] == [["0", "0"], ["1", "2"]]
    assert [json.loads((tmp_path / f"kill.{rank}").read_text()) for rank in (0, 1)] == undisturbed
