"""Functions on ranks that are separate processes, for all start methods, and within a pytest session (I-19)."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only

from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import FunctionLauncher, RankFailedError, current_processes

_ONE = Placement()
_TWO = Placement(world_size=2, local_world_size=2)
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def _join() -> int:
    """Create a process group over the world's store, as a run does; return the rank."""
    world = current_processes()
    assert world is not None
    assert (world.kind, world.failures()) == ("function", [])
    place = world.placement
    dist.init_process_group("gloo", store=world.store("fit"), rank=place.rank, world_size=place.world_size)
    return place.rank


def _train(weight: torch.Tensor) -> dict[str, Any]:
    weight += _join() + 1
    dist.all_reduce(weight)
    dist.destroy_process_group()
    return {
        "state": {"weight": weight, "half": torch.ones(3, dtype=torch.bfloat16)},
        "variables": {name: os.environ[name] for name in _NAMES},
        "surroundings": (os.environ.get("DRIVETRAIN_TEST_OWN"), os.getcwd()),
        "rank of lightning_utilities": rank_zero_only.rank,  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_values_come_back_and_nothing_of_the_caller_changes(method: Any, monkeypatch: Any, tmp_path: Path) -> None:
    #
    monkeypatch.setenv("DRIVETRAIN_TEST_OWN", method)
    monkeypatch.chdir(tmp_path)
    weight = torch.zeros(1 << 19)  # 2 MB: more than any pipe holds
    environment, threads = dict(os.environ), threading.active_count()
    handlers = [signal.getsignal(number) for number in _SIGNALS]
    temporary = tmp_path / "temporary"  # other runs on this machine use the default temporary folder
    temporary.mkdir()
    multiprocessing.util.get_temp_dir()  # for this process's sockets; pytest's path would be too long
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    for rank, result in enumerate(FunctionLauncher(method).call_all(_TWO, _train, weight)):
        assert torch.equal(result["state"]["weight"], torch.full((1 << 19,), 3.0))
        assert result["state"]["half"].tolist() == [1.0, 1.0, 1.0]
        assert result["variables"] == dict(zip(_NAMES, (str(rank), str(rank), "2", "2", "True"), strict=True))
        assert result["surroundings"] == (method, str(tmp_path))
        assert result["rank of lightning_utilities"] == rank  # S-18
    # Sent by value: changes on the ranks have no effect here.
    assert not weight.any()
    assert not weight.is_shared()
    assert (dict(os.environ), threading.active_count()) == (environment, threads)
    assert handlers == [signal.getsignal(number) for number in _SIGNALS]
    assert current_processes() is None
    assert not dist.is_initialized()
    assert not [path for path in temporary.iterdir() if path.name.startswith("drivetrain-")]


def _rank() -> str:
    return os.environ["RANK"]


def test_a_call_returns_rank_0s_value() -> None:
    assert FunctionLauncher("fork").call_all(_ONE, _rank) == ["0"]
    unpicklable = 5, lambda value: value
    assert FunctionLauncher("fork").call(_TWO, lambda pair: (_rank(), pair[1](pair[0])), unpicklable) == ("0", 5)


def test_the_store_has_no_threads_when_processes_are_forked() -> None:
    # a thread that resolved a peer's address left glibc's lock on it locked in the forked copy, which waited
    # forever
    watched, seen = [True], []

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    os.register_at_fork(before=lambda: seen.append(threads()) if watched else None)
    FunctionLauncher("fork").call(_TWO, _rank)  # torch's own threads have started
    before = threads()
    seen.clear()
    assert FunctionLauncher("fork").call(_TWO, _rank) == "0"
    watched.clear()
    assert seen == [before, before]


def _use_all_threads() -> float:
    return float((torch.ones(600, 600) @ torch.ones(600, 600)).sum())


def test_forked_processes_compute_after_openmp_has_run_here() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    expected = _use_all_threads()
    torch.set_num_threads(before)
    assert FunctionLauncher("fork").call_all(_TWO, _use_all_threads) == [expected, expected]


def _fail_on_one(how: str, folder: Path) -> None:
    rank = _join()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    dist.barrier()
    if rank == 1:
        (folder / "failed").write_text(str(time.monotonic()))
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        kind, _, code = how.rpartition(" ")
        if kind == "leaves with":
            os._exit(int(code))
        if kind == "exits with":
            sys.exit(int(code))
        raise ValueError("from rank one")
    if how == "raises beside one that hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    dist.barrier()


@pytest.mark.parametrize(
    ("method", "how", "message"),
    [
        ("fork", "raises", "(?s)Rank 1 failed with ValueError: from rank one.*in _fail_on_one"),
        ("forkserver", "raises", "(?s)Rank 1 failed with ValueError: from rank one.*in _fail_on_one"),
        ("fork", "raises beside one that hangs", "Rank 1 failed with ValueError: from rank one"),
        ("forkserver", "is killed", "Rank 1 was killed by SIGKILL"),
        ("fork", "leaves with 3", "Rank 1 ended with exit code 3"),
        ("fork", "leaves with 0", "Rank 1 ended before its function had returned"),
        ("fork", "exits with 4", "Rank 1 failed with SystemExit: 4"),
        ("fork", "exits with 0", "Rank 1 failed with SystemExit: 0"),
    ],
)
def test_the_first_cause_is_raised_and_all_ranks_end(method: Any, how: str, message: str, tmp_path: Path) -> None:
    # G-01, G-02
    settings = {"grace": 0.5} if how == "raises beside one that hangs" else {}
    with pytest.raises(RankFailedError, match=message) as caught:
        FunctionLauncher(method, **settings).call(_TWO, _fail_on_one, how, tmp_path)
    assert time.monotonic() - float((tmp_path / "failed").read_text()) < 15
    for rank in (0, 1):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid-{rank}").read_text()), 0)
    if how == "raises":
        assert caught.value.failure.error_type == "ValueError"
        assert FunctionLauncher(method).call(_TWO, _rank) == "0"  # G-07: and again in the same process


def _raise(error: BaseException) -> None:
    raise error


def test_an_error_of_every_rank_is_raised_unchanged() -> None:
    refusal = ConfigurationError("devices=9 cannot be had", "there are 2", "ask for 2")
    with pytest.raises(ConfigurationError, match="devices=9 cannot be had") as caught:
        FunctionLauncher("fork").call(_TWO, _raise, refusal)
    assert caught.value.fix == "ask for 2"
    (note,) = caught.value.__notes__
    assert note.startswith("Traceback of rank ")
    assert note.endswith("raise error")
    assert caught.value.__cause__ is None  # it would be printed with the same text and traceback
    with pytest.raises(ValueError, match="from rank one"):
        FunctionLauncher("fork").call(_ONE, _raise, ValueError("from rank one"))
    with pytest.raises(SystemExit) as exited:
        FunctionLauncher("fork").call(_TWO, _raise, SystemExit(143))
    assert exited.value.code == 143


def test_what_cannot_be_sent_is_refused() -> None:  # I-19
    with pytest.raises(ConfigurationError, match=r"(?s)spawn.*lock.*Fix: ") as caught:
        FunctionLauncher("spawn").call(_TWO, _raise, threading.Lock())
    assert "drivetrain.testing.run_distributed(function, 2)" in caught.value.fix


def _launch_again() -> str:
    try:
        FunctionLauncher("fork").call(_TWO, _rank)
    except ConfigurationError as error:
        return str(error)
    return "started"


def test_a_started_process_starts_no_others() -> None:
    assert "rank 0 of 2 cannot start processes" in FunctionLauncher("fork").call(_TWO, _launch_again)


_SCRIPT = """
from drivetrain.environments import Placement
from drivetrain.launchers import FunctionLauncher

class Settings:
    def __init__(self, value):
        self.value = value

def work(settings):
    return settings.value + 1

two = Placement(world_size=2, local_world_size=2)
{guard}
    print(FunctionLauncher("spawn").call_all(two, work, Settings(1)))
"""


@pytest.mark.parametrize("guard", ['if __name__ == "__main__":', "if True:"])
def test_a_script_may_define_what_spawned_processes_need_and_needs_a_main_guard(guard: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT.format(guard=guard))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: Any = {"capture_output": True, "text": True, "timeout": 60, "env": environment, "check": False}
    run = subprocess.run([sys.executable, str(tmp_path / "script.py")], **pipes)
    if guard != "if True:":
        assert run.stdout.split("\n")[-2] == "[2, 2]", run.stderr
        return
    assert run.returncode != 0
    assert "if __name__ == '__main__':" in run.stderr  # in multiprocessing's own words


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
