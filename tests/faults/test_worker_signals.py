"""A signal to the process group ends a run with one checkpoint, whatever starts the loader's workers: S-15, J-09.

This file is also the script that is signalled. It prints when the signal should arrive: while workers start, or within
a read.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from drivetrain import Fit, TrainModule
from drivetrain.testing import requires_linux


class Slow(Dataset[Any]):
    """Loading it in a worker takes a second; reading one sample takes longer than torch's check for living workers."""

    def __init__(self, moment: str) -> None:
        self.moment = moment

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.moment == "starting":
            print("NOW", flush=True)
            time.sleep(1)

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.05)
        if self.moment == "reading" and index == 8:
            print("NOW", flush=True)
            time.sleep(6)
        return torch.tensor([float(index), 1.0])


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@requires_linux()
def test_a_signal_to_the_group_ends_the_run_with_one_checkpoint(tmp_path: Path) -> None:  # S-15
    runs = {}
    for method, moment, number in (
        ("fork", "reading", signal.SIGUSR1),
        ("spawn", "starting", signal.SIGTERM),
        ("forkserver", "reading", signal.SIGTERM),
    ):
        command = [sys.executable, __file__, method, moment, str(tmp_path / method)]
        merged: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        runs[method] = subprocess.Popen(command, **merged), number
    for process, number in runs.values():
        assert process.stdout is not None
        assert "NOW\n" in process.stdout
        os.killpg(process.pid, number)
    for method, (process, number) in runs.items():
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + number, (method, output)
        (saved,) = [path.parent.name for path in (tmp_path / method).rglob("manifest.json")]
        assert saved.startswith("interrupted-step="), method


if __name__ == "__main__":
    method, moment, folder = sys.argv[1:]
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    fit = Fit(
        accelerator="cpu", default_root_dir=folder, max_epochs=1, preemption_signals=["SIGTERM", "SIGUSR1"], **quiet
    )
    fit.fit(Net(), DataLoader(Slow(moment), 2, num_workers=1, multiprocessing_context=method))
