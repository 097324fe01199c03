"""After a run, failed or not, nothing of it remains in the process or on the machine: G-07, A-03."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from drivetrain.testing import requires_linux

SCRIPT = """
import json, os, socket, sys, threading
import torch
from drivetrain import Fit, TrainModule

class Small(TrainModule):
    def __init__(self, fails=False):
        super().__init__()
        self.layer, self.fails = torch.nn.Linear(2, 1), fails
    def training_step(self, batch, batch_idx):
        if self.fails and self.global_rank == self.trainer.world_size - 1 and batch_idx == 1:
            raise RuntimeError("planted")
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def held():
    children = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
            command = open(f"/proc/{pid}/cmdline").read() if fields[0] != "Z" else "zombie"
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and "resource_tracker" not in command and "forkserver" not in command:
            children.append(command)
    files = [f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd")]
    sockets = sum(os.readlink(one).startswith("socket:") for one in files if os.path.lexists(one))
    return {"children": children, "threads": [one.name for one in threading.enumerate()], "sockets": sockets}

def fit(strategy, fails):
    devices = 1 if strategy == "single_device" else 2
    options = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    loader = torch.utils.data.DataLoader(torch.randn(16, 2), batch_size=4, num_workers=1)
    runner = Fit(strategy=strategy, devices=devices, accelerator="cpu", launcher="forkserver", max_epochs=1, **options)
    try:
        runner.fit(Small(fails), loader)
        assert not fails
    except Exception as error:
        assert fails and "planted" in str(error), error

if __name__ == "__main__":
    fit("single_device", False)  # what a first run imports and starts for good is none of a later one's
    fit("ddp", False)
    before = held()
    found = []
    for strategy, fails in (("single_device", True), ("ddp", True), ("fsdp", True), ("fsdp", False)):
        fit(strategy, fails)
        found.append((strategy, fails, held()))
    print(json.dumps([before, found]))
"""


@requires_linux()
def test_a_run_leaves_no_process_thread_socket_or_file(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # Workers share memory through sockets in TMPDIR, whose paths are limited to 108 characters; pytest's are long.
    with tempfile.TemporaryDirectory(prefix="left-") as temporary:
        environment = {**os.environ, "TMPDIR": temporary, "OMP_NUM_THREADS": "1"}
        pipes: Any = {"capture_output": True, "text": True, "timeout": 150}
        ended = subprocess.run([sys.executable, str(script)], env=environment, cwd=tmp_path, **pipes)
        files = [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")]  # torch's own cache
    assert ended.returncode == 0, ended.stderr
    before, found = json.loads(ended.stdout.splitlines()[-1])
    for strategy, fails, after in found:
        assert after == before, (strategy, fails)
    assert files == []
    # The processes of other tests have semaphores and shared memory too, so that a list of /dev/shm would show theirs.
    # The resource tracker of this run reports what its own processes did not remove.
    assert "leaked" not in ended.stderr, ended.stderr
