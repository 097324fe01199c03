"""Preempted runs save, end in order, and resume as if they had not been interrupted: G-03."""

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
from drawing_run import SAMPLES, STRATEGIES, Drawing, train

from drivetrain import Fit
from drivetrain.data import read_predictions
from drivetrain.testing import requires_linux, run_distributed

HERE = Path(__file__).parent


def _leave_and_go_on(folder: Path, names: list[str]) -> dict[str, Any]:
    """Return each strategy's results: of an undisturbed run, and of one that left within an epoch after one rank's
    signal.
    """
    rank, told = int(os.environ["RANK"]), {}

    def tell(what: str, *values: Any) -> None:
        if what == "step" and values == (4,) and rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    for name in names:
        undisturbed = train(folder / name / "undisturbed", name, 100, False, lambda *words: None)
        left: Any = None
        try:
            train(folder / name / "left", name, 100, False, tell)
        except SystemExit as error:
            left = error.code
        found = sorted(os.listdir(folder / name / "left" / "drivetrain_logs" / "version_0" / "checkpoints"))
        resumed = train(folder / name / "left", name, 100, False, lambda *words: None)
        told[name] = left, found, resumed == undisturbed
    return told


def test_all_ranks_leave_after_the_same_step_and_lose_nothing(tmp_path: Path) -> None:
    names = [name for name in STRATEGIES if name not in ("single", "zero 3")]
    env = {"DRIVETRAIN_PREEMPTION_SIGNALS": "SIGUSR1"}
    for told in run_distributed(_leave_and_go_on, 2, tmp_path, names, process_group=None, env=env):
        for name, (code, found, alike) in told.items():
            assert code == 128 + signal.SIGUSR1, name
            assert next(one for one in found if "step" in one).startswith("interrupted-step="), (name, found)
            assert alike, name


def _leave_at(folder: Path, name: str, step: int) -> tuple[Any, list[tuple[int, int]]]:
    """Run until the last rank is preempted after ``step``; return the outcome, and the samples that were used."""
    seen: list[tuple[int, int]] = []
    window: list[tuple[int, int]] = []
    made = -1
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def tell(what: str, *values: Any) -> None:
        nonlocal made
        if what == "seen":
            window.extend(*values)
        if what == "step" and values != (made,):  # samples of the abandoned window do not count
            (made,) = values
            seen.extend(window)
            window.clear()
        if what == "step" and values == (step,) and last:
            os.kill(os.getpid(), signal.SIGUSR1)

    try:
        train(folder, name, 100, False, tell)
    except SystemExit as error:
        return error.code, seen
    return None, seen


def test_a_resume_on_fewer_or_more_ranks_uses_every_sample_once(tmp_path: Path) -> None:  # F-02, G-03
    seen, codes = [], []
    env = {"DRIVETRAIN_PREEMPTION_SIGNALS": "SIGUSR1"}
    for name, ranks, step in (("fsdp", 2, 1), ("single", 1, 3), ("ddp", 2, -1)):
        told = run_distributed(_leave_at, ranks, tmp_path, name, step, process_group=None, env=env)
        codes.append({code for code, _ in told})
        seen.append([one for _, samples in told for one in samples])
    assert codes == [{128 + signal.SIGUSR1}, {128 + signal.SIGUSR1}, {None}]
    assert all(any(epoch == 0 for epoch, _ in samples) for samples in seen)  # each had a part of one epoch
    everything = [one for samples in seen for one in samples]
    assert sorted(everything) == [(epoch, sample) for epoch in range(2) for sample in range(SAMPLES)]


# Scripts, whose processes are signalled from outside.

_SCRIPT = """
import os, sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Fit, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            open(f"at-{self.global_rank}-{os.getpid()}", "w").close()
        time.sleep(0.02)
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    launcher = sys.argv[1]
    options = {} if launcher == "torchrun" else {"launcher": launcher, "devices": 2}
    fit = Fit(strategy="ddp", accelerator="cpu", logger=False, enable_progress_bar=False, max_epochs=9, **options)
    loader = DataLoader(TensorDataset(torch.ones(4000, 4)), batch_size=2, num_workers=1)
    try:
        fit.fit(Net(), loader, ckpt_path="auto")
    finally:
        sys.stdout.write(f"{fit.state} {fit.global_step}\\n")  # in one piece, or it mixes with the other rank's
        sys.stdout.flush()
"""


@requires_linux()
@pytest.mark.parametrize(
    ("launcher", "number", "to", "code"),
    [
        ("torchrun", signal.SIGTERM, "group", None),
        ("subprocess", signal.SIGTERM, "caller", 128 + signal.SIGTERM),
        ("subprocess", signal.SIGINT, "group", -signal.SIGINT),
        ("forkserver", signal.SIGTERM, "group", 128 + signal.SIGTERM),
    ],
)
def test_a_preempted_script_saves_and_exits(
    tmp_path: Path, launcher: str, number: signal.Signals, to: str, code: int | None
) -> None:
    """Data-loading workers are in the process group that gets the signal, and are still needed."""
    (tmp_path / "script.py").write_text(_SCRIPT)
    command = [sys.executable, "script.py", launcher]
    if launcher == "torchrun":
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=variables, start_new_session=True, **pipes)
    try:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("at-*"))) < 2 and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        if to == "group":
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        out, errors = process.communicate(timeout=40)
    finally:
        process.kill()
    assert "interrupted" in out, errors
    steps = {
        line.split()[1] for line in out.splitlines() if line.startswith("interrupted") and launcher != "forkserver"
    }
    saved = [
        one
        for one in os.listdir(tmp_path / "drivetrain_logs" / "version_0" / "checkpoints")
        if one.startswith("interrupted")
    ]
    assert len(saved) == 1
    assert steps <= {saved[0].partition("=")[2]}
    assert process.returncode == code if code is not None else process.returncode != 0
    assert "DataLoader worker" not in errors
    # No process remains.
    for path in tmp_path.glob("at-*"):
        assert not Path(f"/proc/{path.name.split('-')[2]}").exists()


_PREDICTING = """
import os, sys, time, torch
from torch.utils.data import DataLoader
from drivetrain import Fit, TrainModule
from drivetrain.callbacks import PredictionWriter

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
    def predict_step(self, batch, batch_idx):
        if batch_idx == 3 and len(sys.argv) < 3:
            open(f"at-{self.global_rank}-{os.getpid()}", "w").close()
        time.sleep(0.02 if len(sys.argv) < 3 else 0)
        return self.layer(batch)

if __name__ == "__main__":
    launcher = sys.argv[1]
    options = {} if launcher == "torchrun" else {"launcher": launcher, "devices": 2}
    fit = Fit(strategy="ddp", accelerator="cpu", logger=False, enable_progress_bar=False,
              callbacks=PredictionWriter("predictions"), **options)
    loader = DataLoader(torch.ones(4000, 4), batch_size=2, num_workers=1)
    try:
        fit.predict(Net(), loader, return_predictions=False)
    finally:
        sys.stdout.write(f"{fit.state}\\n")
        sys.stdout.flush()
"""


@requires_linux()
@pytest.mark.parametrize(
    ("launcher", "to", "code"),
    [("torchrun", "one rank", None), ("subprocess", "group", 143), ("forkserver", "caller", 143)],
)
def test_a_preempted_prediction_keeps_what_it_has_predicted(
    tmp_path: Path, launcher: str, to: str, code: int | None
) -> None:
    (tmp_path / "script.py").write_text(_PREDICTING)
    command = [sys.executable, "script.py", launcher]
    if launcher == "torchrun":
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=variables, start_new_session=True, **pipes)
    try:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("at-*"))) < 2 and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        if to == "group":
            os.killpg(process.pid, signal.SIGTERM)
        elif to == "one rank":
            os.kill(int(next(tmp_path.glob("at-1-*")).name.split("-")[2]), signal.SIGTERM)
        else:
            process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=40)
    finally:
        process.kill()
    assert "interrupted" in out, errors
    assert "finished" not in out, errors
    assert process.returncode == code if code is not None else process.returncode != 0
    assert len(list((tmp_path / "predictions").glob("part-*"))) == 2  # each rank has written what it had
    assert "Traceback" not in errors or launcher == "torchrun", errors
    for path in tmp_path.glob("at-*"):
        assert not Path(f"/proc/{path.name.split('-')[2]}").exists()
    if launcher != "subprocess":
        return
    subprocess.run([*command, "resumed"], cwd=tmp_path, env=variables, check=True, capture_output=True, timeout=90)
    assert len(read_predictions(tmp_path / "predictions")) == 4000


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
