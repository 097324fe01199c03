"""A signal to the process group ends a run with one checkpoint, whatever starts the loader's workers: S-15, J-09."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.testing import requires_linux

SCRIPT = Path(__file__).parent / "worker_signals_run.py"


@requires_linux()
@pytest.mark.parametrize(
    ("method", "moment", "number"),
    [
        ("fork", "reading", signal.SIGUSR1),
        ("spawn", "starting", signal.SIGTERM),
        ("spawn", "reading", signal.SIGUSR1),
        ("forkserver", "starting", signal.SIGUSR1),
        ("forkserver", "reading", signal.SIGTERM),
    ],
)
def test_a_signal_to_the_group_ends_the_run_with_one_checkpoint(
    method: str, moment: str, number: signal.Signals, tmp_path: Path
) -> None:  # S-15
    command = [sys.executable, str(SCRIPT), method, moment, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        before = ""
        for line in process.stdout:
            before += line
            if line == "NOW\n":
                break
        os.killpg(process.pid, number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, before + output
    saved = [path.parent.name for path in tmp_path.rglob("manifest.json")]
    assert len(saved) == 1, saved
    assert saved[0].startswith("interrupted-step=")
