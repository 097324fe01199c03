"""A `Fit` for several processes within a real pytest session, which must run only once. Row I-19."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

_CONFTEST = """
from pathlib import Path

HERE = Path(__file__).parent

def note(name):
    with open(HERE / name, "a") as file:
        file.write("x")

def pytest_sessionstart(session):
    note("sessions")

note("imported")
"""

_TESTS = """
import threading

import pytest
import torch
from conftest import HERE, note

from drivetrain import ConfigurationError, Fit, TrainModule

X = torch.arange(32.0).reshape(16, 2) / 32

def fitted(**settings):
    class Line(TrainModule):  # local: only a copy of this process knows it
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            note(f"steps-{self.trainer.global_rank}")
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Line()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X), batch_size=4)
    where = dict(accelerator="cpu", strategy="ddp", devices=2, default_root_dir=HERE)
    trainer = Fit(**where, max_epochs=1, barebones=True, **settings)
    trainer.fit(module, loader)
    return trainer, module, Line()

def test_a_test_trains_on_two_processes_and_gets_everything_back():
    note("tests")
    trainer, module, untrained = fitted()
    assert not torch.equal(module.net.weight, untrained.net.weight)
    assert trainer.global_step == 2 and trainer.world_size == 2
    assert (HERE / "steps-0").read_text() == (HERE / "steps-1").read_text() == "xx"

def test_a_thread_of_a_test_trains_too():
    note("tests")
    found = []
    thread = threading.Thread(target=lambda: found.append(fitted()[0].global_step))
    thread.start()
    thread.join()
    assert found == [2]

def test_to_run_the_session_again_is_refused():
    note("tests")
    with pytest.raises(ConfigurationError, match="pytest runs this code"):
        fitted(launcher="subprocess")
"""


def test_a_session_runs_only_once(tmp_path: Path) -> None:  # I-19
    (tmp_path / "conftest.py").write_text(textwrap.dedent(_CONFTEST))
    (tmp_path / "test_mine.py").write_text(textwrap.dedent(_TESTS))
    # Variables of this session must not affect the inner one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "3 passed" in run.stdout
    written = {name: (tmp_path / name).read_text() for name in ("imported", "sessions", "tests")}
    assert written == {"imported": "x", "sessions": "x", "tests": "xxx"}
