"""`World`: ranks that are started once and reset before each function; `run_distributed` starts them for each call."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.errors import ConfigurationError, DistributedError
from drivetrain.launchers import RankFailedError
from drivetrain.testing import World, run_distributed
from drivetrain.testing._stack_dump import dump_stacks_to

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")


def _sum(value: float) -> tuple[int, int, float, bool]:
    tensor = torch.full((), value * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return os.getpid(), dist.get_rank(), tensor.item(), "torch._dynamo" in sys.modules


def _pids(world: World) -> list[int]:
    return [pid for pid, *_ in world.run(_sum, 1.0)]


def _assert_gone(pids: list[int]) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_calls_go_to_the_same_processes() -> None:
    with World(2) as world:
        pids = _pids(world)
        second = world.run(_sum, 2.0)
    # A later import of dynamo would keep the group's threads alive.
    assert second == [(pids[0], 0, 6.0, True), (pids[1], 1, 6.0, True)]
    _assert_gone(pids)


def test_run_distributed_returns_every_ranks_value_by_rank() -> None:
    results = run_distributed(_sum, 3, 2.0)
    assert [(rank, total) for _, rank, total, _ in results] == [(0, 12.0), (1, 12.0), (2, 12.0)]
    _assert_gone([pid for pid, *_ in results])


def _draw_and_change() -> dict[str, Any]:
    found = {
        "torch": torch.rand(()).item(),
        "python": random.random(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "excepthook": sys.excepthook.__module__,
        "handler": signal.getsignal(signal.SIGTERM),
        "threads": torch.get_num_threads(),
        "group": dist.is_initialized(),
    }
    torch.use_deterministic_algorithms(True)
    sys.excepthook = lambda *_: None
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(2)
    return found


def test_every_function_starts_with_initial_generators_and_defaults() -> None:
    with World(2) as world:
        first = world.run(_draw_and_change, process_group=None)
        assert world.run(_draw_and_change, process_group=None) == first
    defaults = {"deterministic": False, "excepthook": "sys", "handler": signal.SIG_DFL, "threads": 1, "group": False}
    assert all(defaults.items() <= found.items() for found in first)


def _surroundings(names: list[str]) -> tuple[list[str | None], str, bool]:
    return [os.environ.get(name) for name in names], os.getcwd(), dist.is_initialized()


def _own_group() -> float:
    dist.init_process_group("gloo")
    tensor = torch.ones(())
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


def test_a_call_sees_the_callers_current_environment_and_torchruns_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["DRIVETRAIN_TEST_CALL", *_TORCHRUN]
    before, variables = os.getcwd(), dict(os.environ)
    with World(2) as world:
        assert world.run(_surroundings, names) == [([None] * 6, before, True)] * 2
        monkeypatch.setenv("DRIVETRAIN_TEST_CALL", "second")
        monkeypatch.chdir(tmp_path)
        of_ranks = [["second", rank, rank, "2", "2", "True"] for rank in ("0", "1")]
        assert world.run(_surroundings, names, process_group=None) == [(one, str(tmp_path), False) for one in of_ranks]
        assert world.run(_own_group, process_group=None) == [2.0, 2.0]
        monkeypatch.undo()
        assert world.run(_surroundings, names) == [([None] * 6, before, True)] * 2
        [(first, *_), _] = world.run(_surroundings, names[:1], env={"DRIVETRAIN_TEST_CALL": "x"})
        assert first == ["x"]
    assert dict(os.environ) == variables


def test_a_module_that_appears_after_the_start_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_later.py").write_text("def one():\n    return 1\n")
    with World(1) as world:
        world.run(_surroundings, [])
        monkeypatch.syspath_prepend(str(tmp_path))
        import made_later  # type: ignore[import-not-found]

        assert world.run(made_later.one) == [1]


def _fail_on_one(how: str) -> object:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # writing a core file would take longer than the timeout
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("from rank one")
        if how == "exits":
            sys.exit(3)
        if how == "returns a lambda":
            return lambda: None
        if how == "holds the GIL":
            ctypes.PyDLL(None).sleep(60)
        os.kill(os.getpid(), {"is killed": signal.SIGKILL, "has a fault": signal.SIGSEGV}[how])
    dist.barrier()
    return None


_FAILURES = {
    "raises": "(?s)Rank 1 failed with ValueError: from rank one.*in _fail_on_one",
    "exits": "Rank 1 failed with SystemExit: 3",
    "returns a lambda": r"Rank 1 failed with .*(pickle|get) local object",
    "is killed": "Rank 1 was killed by SIGKILL",
    "has a fault": "(?s)Rank 1 was killed by SIGSEGV.*in _fail_on_one",
    "holds the GIL": "(?s)Rank 0, 1 of 2 did not return within 1 s.*rank 0:.*in barrier.*rank 1:.*in _fail_on_one",
}


def test_a_failed_world_is_recreated() -> None:
    with World(2) as world:
        before = _pids(world)
        for how, message in _FAILURES.items():
            with pytest.raises(DistributedError, match=message) as caught:
                world.run(_fail_on_one, how, timeout=1 if how == "holds the GIL" else 60)
            if how != "holds the GIL":
                assert isinstance(caught.value, RankFailedError)
                assert caught.value.failure.rank == 1
            _assert_gone(before)
            after = _pids(world)
            assert not {*after} & {*before}
            before = after


def _busy_when_time_is_up(folder: str, times: int) -> list[str]:
    told = []
    for number in range(times):
        path = Path(folder) / str(number)
        with dump_stacks_to(path, 0.005):
            until = time.monotonic() + 1
            while time.monotonic() < until and not path.stat().st_size:
                sum(abs(number) for number in range(20))
        told.append(path.read_text())
    return told


def test_a_busy_rank_reports_its_stack_after_the_timeout(tmp_path: Path) -> None:
    (told,) = run_distributed(_busy_when_time_is_up, 1, str(tmp_path), 50, process_group=None)
    assert all("_busy_when_time_is_up" in text and "late.py" not in text.splitlines()[1] for text in told)


def test_a_rank_that_died_between_calls_is_reported_and_replaced() -> None:
    with World(1) as world:
        [pid] = _pids(world)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankFailedError, match="Rank 0 was killed by SIGKILL"):
            world.run(_sum, 1.0)
        assert _pids(world) != [pid]


def _leave(what: str) -> None:
    if what == "group":
        dist.init_process_group("gloo")
    elif what == "variable":
        os.environ["LEFT_BEHIND"] = "1"
    elif what == "dtype":
        torch.set_default_dtype(torch.float64)
    elif what == "grad":
        torch.set_grad_enabled(False)
    elif what == "thread":
        threading.Thread(target=time.sleep, args=(60,), name="sleeper").start()
    elif what == "child":
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), name="napper").start()


def _defaults() -> tuple[torch.dtype, bool, int]:
    late = sum(isinstance(thread, threading.Timer) for thread in threading.enumerate())
    return torch.get_default_dtype(), torch.is_grad_enabled(), threading.active_count() - late


def test_state_left_behind_is_an_error_and_removed() -> None:
    with World(1) as world:
        for what, told in (
            ("group", "a default process group"),
            ("variable", "changed environment variables: LEFT_BEHIND"),
            ("dtype", "another default dtype"),
            ("grad", "another grad mode"),
            ("thread", "the thread 'sleeper'"),
            ("child", "the child process 'napper'"),
        ):
            with pytest.raises(DistributedError, match=f"Rank 0 returned but left behind {told}"):
                world.run(_leave, what, process_group=None)
            ((names, _, initialized),) = world.run(_surroundings, ["LEFT_BEHIND"], process_group=None)
            assert (names, initialized) == ([None], False), what
            assert world.run(_defaults) == [(torch.float32, True, 1)], what


def test_unpicklable_arguments_are_refused_without_damage() -> None:
    with World(1) as world:
        pids = _pids(world)
        with pytest.raises(ConfigurationError, match=r"(?s)cannot send.*Fix: use a function at the top level"):
            world.run(lambda: None)
        assert _pids(world) == pids
