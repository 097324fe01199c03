"""Functions on ranks that are separate processes, for all start methods."""

from __future__ import annotations

import contextlib
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

from drivetrain._distributed.failure import Failure, failure_file
from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError, DistributedError
from drivetrain.launchers import FunctionLauncher, RankFailedError, current_world
from drivetrain.launchers._processes import Processes

_ONE = Placement()
_TWO = Placement(world_size=2, local_world_size=2)
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")


def _train(weight: torch.Tensor, name: str) -> dict[str, Any]:
    """Do what a fit does, on a small scale: a group over the world's store, an in-place change, state to return."""
    world = current_world()
    assert world is not None
    assert world.kind == "function"
    assert world.failures() == []
    place = world.placement
    dist.init_process_group("gloo", store=world.store("fit"), rank=place.rank, world_size=place.world_size)
    weight += place.rank + 1
    dist.all_reduce(weight)
    dist.destroy_process_group()
    return {
        "state": {name: weight, "half": torch.ones(3, dtype=torch.bfloat16)},
        "variables": {name: os.environ[name] for name in _NAMES},
        "own": os.environ.get("DRIVETRAIN_TEST_OWN"),
        "threads": torch.get_num_threads(),
        "folder": os.getcwd(),
        "utilities": rank_zero_only.rank,  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_values_come_back_and_nothing_of_the_caller_changes(
    method: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRIVETRAIN_TEST_OWN", method)
    monkeypatch.chdir(tmp_path)
    weight = torch.zeros(1 << 19)  # 2 MB: more than any pipe holds
    environment, threads = dict(os.environ), threading.active_count()
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)]
    temporary = tmp_path / "temporary"  # other runs on this machine use the default temporary folder
    temporary.mkdir()
    multiprocessing.util.get_temp_dir()  # for this process's sockets; pytest's path would be too long
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    results = FunctionLauncher(method).launch_all(_TWO, _train, weight, "weight")

    for rank, result in enumerate(results):
        assert torch.equal(result["state"]["weight"], torch.full((1 << 19,), 3.0))
        assert result["state"]["half"].tolist() == [1.0, 1.0, 1.0]
        assert result["variables"] == dict(zip(_NAMES, (str(rank), str(rank), "2", "2", "True"), strict=True))
        assert result["own"] == method
        assert (result["folder"], result["utilities"]) == (str(tmp_path), rank)  # S-18
        assert result["threads"] >= 1
    # Sent by value: changes on the ranks have no effect here.
    assert not weight.any()
    assert not weight.is_shared()
    assert dict(os.environ) == environment
    assert threading.active_count() == threads
    assert handlers == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)]
    assert current_world() is None
    assert not dist.is_initialized()
    assert not [path for path in temporary.iterdir() if path.name.startswith("drivetrain-")]


def _rank() -> str:
    return os.environ["RANK"]


def test_launch_returns_the_first_ranks_value() -> None:
    assert FunctionLauncher("fork").launch(_TWO, _rank) == "0"


def test_one_process_and_later_nodes() -> None:
    assert FunctionLauncher("fork").launch_all(_ONE, _rank) == ["0"]


def test_the_store_has_no_threads_when_processes_are_forked() -> None:
    # a thread that resolved a peer's address left glibc's lock on it locked in the forked copy, which waited
    # forever
    watched, seen = [True], []

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    os.register_at_fork(before=lambda: seen.append(threads()) if watched else None)
    FunctionLauncher("fork").launch(_TWO, _rank)  # torch's own threads have started
    before = threads()
    seen.clear()
    assert FunctionLauncher("fork").launch(_TWO, _rank) == "0"
    watched.clear()
    assert seen == [before, before]


def _use_all_threads() -> float:
    return float((torch.ones(600, 600) @ torch.ones(600, 600)).sum())


def test_forked_processes_compute_after_openmp_has_run_here() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        expected = _use_all_threads()
        assert FunctionLauncher("fork").launch_all(_TWO, _use_all_threads) == [expected, expected]
    finally:
        torch.set_num_threads(before)


def test_unpicklable_arguments_can_be_forked() -> None:
    assert FunctionLauncher("fork").launch(_TWO, lambda value: value(), lambda: 5) == 5


def _raise_on_one(pids: str) -> None:
    world = current_world()
    assert world is not None
    rank = world.placement.rank
    Path(pids, str(rank)).write_text(str(os.getpid()))
    dist.init_process_group("gloo", store=world.store("fit"), rank=rank, world_size=2)
    if rank == 1:
        Path(pids, "failed").write_text(str(time.monotonic()))
        raise ValueError("from rank one")
    dist.barrier()


def _assert_gone_in_time(folder: Path) -> None:
    assert time.monotonic() - float((folder / "failed").read_text()) < 15
    _assert_gone(folder)


def _assert_gone(folder: Path) -> None:
    for rank in ("0", "1"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((folder / rank).read_text()), 0)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_first_cause_is_raised_with_its_traceback(method: Any, tmp_path: Path) -> None:  # G-01
    with pytest.raises(DistributedError, match="Rank 1 failed with ValueError: from rank one") as caught:
        FunctionLauncher(method).launch(_TWO, _raise_on_one, str(tmp_path))
    _assert_gone_in_time(tmp_path)
    assert "in _raise_on_one" in str(caught.value)
    assert isinstance(caught.value, RankFailedError)
    assert caught.value.failure.error_type == "ValueError"
    # G-07: and again in the same process
    assert FunctionLauncher(method).launch(_TWO, _rank) == "0"


def _die_on_one(pids: str) -> None:
    world = current_world()
    assert world is not None
    rank = world.placement.rank
    Path(pids, str(rank)).write_text(str(os.getpid()))
    dist.init_process_group("gloo", store=world.store("fit"), rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        Path(pids, "failed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_killed_rank_is_named_with_the_signal(method: Any, tmp_path: Path) -> None:  # G-02
    with pytest.raises(DistributedError, match="Rank 1 was killed by SIGKILL"):
        FunctionLauncher(method).launch(_TWO, _die_on_one, str(tmp_path))
    _assert_gone_in_time(tmp_path)


def _raise_on_one_and_hang(pids: str) -> None:
    rank = os.environ["RANK"]
    Path(pids, rank).write_text(str(os.getpid()))
    if rank == "1":
        raise ValueError("from rank one")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def _killed_beside_one_that_reports(rank: int, ready: Path) -> None:
    if rank == 0:
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ready.touch()
        time.sleep(60)
    except BaseException as error:
        Failure.of_exception(rank, error).write(failure_file(os.environ["TORCHELASTIC_ERROR_FILE"]))
        raise


def test_a_rank_that_dies_does_not_end_ranks_that_report(tmp_path: Path) -> None:  # G-02
    processes = Processes.of_function(
        0, _killed_beside_one_that_reports, [(rank, tmp_path / "ready") for rank in range(2)], "fork"
    )
    try:
        while processes.exit_codes()[0] is None:
            time.sleep(0.01)
        assert processes.values() == {}
        assert processes.exit_codes()[1] is None
        [failure] = processes.failures()
    finally:
        processes.end(kill=True)
    assert (failure.rank, failure.signal_name) == (0, "SIGKILL")


def test_a_rank_that_does_not_exit_is_killed(tmp_path: Path) -> None:  # G-01
    with pytest.raises(DistributedError, match="Rank 1 failed with ValueError: from rank one"):
        FunctionLauncher("fork", grace=0.5).launch(_TWO, _raise_on_one_and_hang, str(tmp_path))
    _assert_gone(tmp_path)


def _exit_on_one(code: int, hard: bool) -> None:
    if os.environ["RANK"] == "1":
        if hard:
            os._exit(code)
        sys.exit(code)
    time.sleep(60)


@pytest.mark.parametrize(
    ("code", "hard", "message"),
    [
        (3, True, "Rank 1 ended with exit code 3"),
        (0, True, "Rank 1 ended before its function had returned"),
        (4, False, "Rank 1 failed with SystemExit: 4"),
        (0, False, "Rank 1 failed with SystemExit: 0"),
    ],
)
def test_a_rank_that_leaves_early_is_a_failure(code: int, hard: bool, message: str) -> None:
    with pytest.raises(DistributedError, match=message):
        FunctionLauncher("fork", grace=0.1).launch(_TWO, _exit_on_one, code, hard)


def _refuse() -> None:
    raise ConfigurationError("devices=9 cannot be had", "there are 2", "ask for 2")


def _exit_all() -> None:
    raise SystemExit(143)


def test_an_error_of_every_rank_is_raised_unchanged() -> None:
    with pytest.raises(ConfigurationError, match="devices=9 cannot be had") as caught:
        FunctionLauncher("fork").launch(_TWO, _refuse)
    assert caught.value.fix == "ask for 2"
    (note,) = caught.value.__notes__
    assert note.startswith("Traceback of rank ")
    assert note.endswith('raise ConfigurationError("devices=9 cannot be had", "there are 2", "ask for 2")')
    assert caught.value.__cause__ is None  # it would be printed with the same text and traceback
    with pytest.raises(ValueError, match="from rank one"):
        FunctionLauncher("fork").launch(_ONE, _raise_value_error)
    with pytest.raises(SystemExit) as exited:
        FunctionLauncher("fork").launch(_TWO, _exit_all)
    assert exited.value.code == 143


def _raise_value_error() -> None:
    raise ValueError("from rank one")


def _with_loader(model: int, loader: object) -> None: ...


def test_unpicklable_arguments_are_named() -> None:  # G-06
    with pytest.raises(ConfigurationError, match=r"(?s)spawn.*the argument 'loader' \(a lock\).*Fix: ") as caught:
        FunctionLauncher("spawn").launch(_TWO, _with_loader, 1, threading.Lock())
    assert caught.value.why
    with pytest.raises(ConfigurationError, match=r"the function '.*<lambda>'"):
        FunctionLauncher("forkserver").launch(_TWO, lambda: None)


def _nest() -> str:
    try:
        FunctionLauncher("fork").launch(_TWO, _rank)
    except ConfigurationError as error:
        return str(error)
    return "started"


def test_a_started_process_starts_no_others() -> None:
    assert "rank 0 of 2 cannot start processes" in FunctionLauncher("fork").launch(_TWO, _nest)


_SCRIPT = """
from drivetrain.environments import Placement
from drivetrain.launchers import FunctionLauncher

class Settings:
    def __init__(self, value):
        self.value = value

def work(settings):
    return settings.value + 1

two = Placement(world_size=2, local_world_size=2)
"""


def _run_script(tmp_path: Path, end: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT + textwrap.dedent(end))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=environment, check=False
    )


def test_functions_and_classes_of_a_script(tmp_path: Path) -> None:
    end = """
    if __name__ == "__main__":
        print(FunctionLauncher("spawn").launch_all(two, work, Settings(1)))
    """
    run = _run_script(tmp_path, end)
    assert run.stdout.split("\n")[-2] == "[2, 2]", run.stderr


def test_a_script_without_a_main_guard_is_refused(tmp_path: Path) -> None:
    run = _run_script(tmp_path, 'FunctionLauncher("spawn").launch_all(two, work, Settings(1))')
    assert run.returncode != 0
    assert "the script starts processes while it is being imported" in run.stderr
    assert 'if __name__ == "__main__":`, put the work of the script under this line' in run.stderr


_WAITING = """
import os, pathlib, time
from drivetrain.environments import Placement
from drivetrain.launchers import FunctionLauncher

def work():
    pathlib.Path(f"up-{os.getpid()}").touch()
    time.sleep(60)

if __name__ == "__main__":
    FunctionLauncher("forkserver").launch(Placement(world_size=2, local_world_size=2), work)
"""


def test_ranks_of_the_fork_server_end_with_a_killed_caller(tmp_path: Path) -> None:  # G-02
    script = tmp_path / "run.py"
    script.write_text(_WAITING)
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    caller = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path, env=environment, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("up-*"))) < 2:
            assert caller.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        caller.kill()
        caller.wait()
        ranks = [int(path.name.removeprefix("up-")) for path in tmp_path.glob("up-*")]
        until = time.monotonic() + 10
        while any(_runs(rank) for rank in ranks):
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(caller.pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
