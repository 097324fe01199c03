"""Preempted runs save, end in order, and resume as if they had not been interrupted: G-03, S-15, J-09."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from drawing_run import Drawing

from drivetrain import Fit
from drivetrain.data import read_predictions
from drivetrain.testing import requires_linux, run_distributed

_SCRIPT = """
import os, sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Fit, TrainModule
from drivetrain.callbacks import PredictionWriter

what, launcher, moment, method = sys.argv[1:]  # ... when the signal is to come, and how workers start

def reached(rank):
    open(f"at-{rank}-{os.getpid()}", "w").close()

class Rows(TensorDataset):
    def __setstate__(self, state):
        self.__dict__.update(state)
        if moment == "starting":
            reached(0)
            time.sleep(1)
    def __getitem__(self, index):
        if moment == "reading" and index == 8:
            reached(0)
            time.sleep(6)  # longer than torch's check for living workers
        return super().__getitem__(index)

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)  # predictions are resumed with the same weights only
        self.layer = torch.nn.Linear(4, 1)
    def predict_step(self, batch, batch_idx):
        if moment == "step" and batch_idx == 3:
            reached(self.global_rank)
        time.sleep(0 if moment == "resumed" else 0.02)
        return self.layer(batch[0])
    def training_step(self, batch, batch_idx):
        return self.predict_step(batch, batch_idx).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    options = {"preemption_signals": ["SIGTERM", "SIGUSR1"]} if launcher == "alone" else {"strategy": "ddp"}
    if launcher not in ("alone", "torchrun"):
        options |= {"launcher": launcher, "devices": 2}
    if what == "predict":
        options["callbacks"] = PredictionWriter("predictions")
    fit = Fit(accelerator="cpu", logger=False, enable_progress_bar=False, max_epochs=9, **options)
    loader = DataLoader(Rows(torch.ones(4000, 4)), batch_size=2, num_workers=1, multiprocessing_context=method)
    try:
        if what == "fit":
            fit.fit(Net(), loader, ckpt_path="auto")
        else:
            fit.predict(Net(), loader, return_predictions=False)
    finally:
        sys.stdout.write(f"{fit.state} {fit.global_step}\\n")  # in one piece, or it mixes with the other rank's
        sys.stdout.flush()
"""


VARIABLES = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def _start(folder: Path, command: list[str]) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(_SCRIPT)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command], cwd=folder, env=VARIABLES, start_new_session=True, **pipes)


def _wait_for_marks(count: int, folder: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while len(list(folder.glob("at-*"))) < count and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)


@requires_linux()
@pytest.mark.parametrize(
    ("what", "launcher", "number", "to", "code"),
    [
        ("fit", "torchrun", signal.SIGTERM, "group", None),
        ("fit", "subprocess", signal.SIGINT, "group", -signal.SIGINT),
        ("fit", "forkserver", signal.SIGTERM, "group", 128 + signal.SIGTERM),
        ("predict", "torchrun", signal.SIGTERM, "one rank", None),
        ("predict", "subprocess", signal.SIGTERM, "caller", 128 + signal.SIGTERM),
    ],
)
def test_a_preempted_script_saves_and_exits(
    tmp_path: Path, what: str, launcher: str, number: signal.Signals, to: str, code: int | None
) -> None:
    """Data-loading workers are in the process group that gets the signal, and are still needed."""
    command = ["script.py", what, launcher]
    if launcher == "torchrun":
        command[:0] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = _start(tmp_path, [*command, "step", "fork"])
    try:
        _wait_for_marks(2, tmp_path, process)
        if to == "group":
            os.killpg(process.pid, number)
        elif to == "one rank":
            os.kill(int(next(tmp_path.glob("at-1-*")).name.split("-")[2]), number)
        else:
            process.send_signal(number)
        out, errors = process.communicate(timeout=40)
    finally:
        process.kill()
    assert "interrupted" in out, errors
    assert "finished" not in out, errors
    assert process.returncode == code if code is not None else process.returncode != 0
    assert "DataLoader worker" not in errors
    for path in tmp_path.glob("at-*"):  # no process remains
        assert not Path(f"/proc/{path.name.split('-')[2]}").exists()
    if what == "fit":
        (saved,) = (tmp_path / "drivetrain_logs" / "version_0" / "checkpoints").glob("interrupted*")
        if launcher != "forkserver":
            steps = {line.split()[1] for line in out.splitlines() if line.startswith("interrupted")}
            assert steps <= {saved.name.partition("=")[2]}
        return
    assert len(list((tmp_path / "predictions").glob("part-*"))) == 2  # each rank has written what it had
    if launcher == "subprocess":
        assert "Traceback" not in errors
        again = _start(tmp_path, [*command, "resumed", "fork"])
        _, errors = again.communicate(timeout=90)
        assert again.returncode == 0, errors
        assert len(read_predictions(tmp_path / "predictions")) == 4000


@requires_linux()
def test_a_signal_ends_a_run_whose_workers_start_or_read_with_one_checkpoint(tmp_path: Path) -> None:  # S-15
    runs = {}
    for method, moment, number in (
        ("fork", "reading", signal.SIGUSR1),
        ("spawn", "starting", signal.SIGTERM),
        ("forkserver", "reading", signal.SIGTERM),
    ):
        runs[method] = _start(tmp_path / method, ["script.py", "fit", "alone", moment, method]), number
    for method, (process, number) in runs.items():
        _wait_for_marks(1, tmp_path / method, process)
        os.killpg(process.pid, number)
    for method, (process, number) in runs.items():
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 128 + number, (method, errors)
        (saved,) = [path.parent.name for path in (tmp_path / method).rglob("manifest.json")]
        assert saved.startswith("interrupted-step="), method


def _stuck(folder: Path) -> None:
    """Block rank 0 in a collective, where no Python signal handler runs, because rank 1 never arrives."""

    class Stuck(Drawing):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 and self.global_rank == 1:
                time.sleep(60)

    def tell(what: str, *values: Any) -> None:
        if what == "step" and values == (1,) and os.environ["RANK"] == "0":
            script = f"sleep 0.7; kill -TERM {os.getpid()}; sleep 0.7; kill -TERM {os.getpid()}"
            subprocess.Popen(["sh", "-c", script])

    fit = Fit(strategy="ddp", accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False)
    data: Any = torch.ones(40, 5)  # a tensor is also a dataset
    fit.fit(Stuck(tell), torch.utils.data.DataLoader(data, batch_size=2))


@requires_linux()
def test_a_second_signal_ends_a_rank_that_waits_in_a_collective(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(Exception, match=r"Rank 0 ended with exit code 143"):
        run_distributed(_stuck, 2, tmp_path, process_group=None)
    assert time.monotonic() - began < 30
