"""`World`: ranks that are started once, and reset before each function."""

from __future__ import annotations

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

from drivetrain._distributed.failure import RankFailedError
from drivetrain.errors import ConfigurationError, DistributedError
from drivetrain.testing import World


def _sum(value: float) -> tuple[int, float]:
    tensor = torch.full((), value * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return os.getpid(), tensor.item()


def test_calls_go_to_the_same_processes() -> None:
    with World(2) as world:
        first, second = world.run(_sum, 1.0), world.run(_sum, 2.0)
    assert [total for _, total in first] == [3.0, 3.0]
    assert [total for _, total in second] == [6.0, 6.0]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    for pid, _ in first:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


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
    for found in first:
        assert not found["deterministic"]
        assert found["excepthook"] == "sys"
        assert found["handler"] == signal.SIG_DFL
        assert found["threads"] == 1
        assert not found["group"]


def _surroundings(names: list[str]) -> tuple[list[str | None], str, bool]:
    return [os.environ.get(name) for name in names], os.getcwd(), dist.is_initialized()


def test_a_call_sees_the_callers_current_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["DRIVETRAIN_TEST_CALL", "RANK"]
    with World(1) as world:
        before = os.getcwd()
        assert world.run(_surroundings, names) == [([None, None], before, True)]
        monkeypatch.setenv("DRIVETRAIN_TEST_CALL", "second")
        monkeypatch.chdir(tmp_path)
        assert world.run(_surroundings, names, process_group=None) == [(["second", "0"], str(tmp_path), False)]
        monkeypatch.undo()
        assert world.run(_surroundings, names) == [([None, None], before, True)]


def test_a_module_that_appears_after_the_start_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_later.py").write_text("def one():\n    return 1\n")
    with World(1) as world:
        world.run(_surroundings, [])
        monkeypatch.syspath_prepend(str(tmp_path))
        import made_later  # type: ignore[import-not-found]

        assert world.run(made_later.one) == [1]


def _raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("from rank one")
    dist.barrier()


def _hang_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()


def _fault_on_one() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # writing a core file would take longer than the timeout
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def _die_on_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(
    ("fail", "error", "message"),
    [
        (_raise_on_one, RankFailedError, "Rank 1 failed with ValueError: from rank one"),
        (_die_on_one, RankFailedError, "Rank 1 was killed by SIGKILL"),
        (_fault_on_one, RankFailedError, "(?s)Rank 1 was killed by SIGSEGV.*in _fault_on_one"),
        (_hang_on_one, DistributedError, "(?s)Rank 0, 1 of 2 did not return within 1 s.*_hang_on_one"),
    ],
)
def test_a_failed_world_is_recreated(fail: Any, error: type[Exception], message: str) -> None:
    with World(2) as world:
        before = [pid for pid, _ in world.run(_sum, 1.0)]
        with pytest.raises(error, match=message):
            world.run(fail, timeout=1)
        for pid in before:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        after = world.run(_sum, 1.0)
    assert [total for _, total in after] == [3.0, 3.0]
    assert not {pid for pid, _ in after} & set(before)


def test_a_rank_that_died_between_calls_is_reported_and_replaced() -> None:
    with World(2) as world:
        pid = world.run(_sum, 1.0)[0][0]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankFailedError, match="Rank 0 was killed by SIGKILL"):
            world.run(_sum, 1.0)
        assert world.run(_sum, 1.0)[0][1] == 3.0


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


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("group", "a default process group"),
        ("variable", "changed environment variables: LEFT_BEHIND"),
        ("dtype", "another default dtype"),
        ("grad", "another grad mode"),
        ("thread", "the thread 'sleeper'"),
        ("child", "the child process 'napper'"),
    ],
)
def test_state_left_behind_is_an_error_and_removed(what: str, told: str) -> None:
    #
    with World(1) as world:
        with pytest.raises(DistributedError, match=f"Rank 0 returned but left behind {told}"):
            world.run(_leave, what, process_group=None)
        ((names, _, initialized),) = world.run(_surroundings, ["LEFT_BEHIND"], process_group=None)
        assert names == [None]
        assert not initialized
        assert world.run(_defaults) == [(torch.float32, True, 1)]


def _defaults() -> tuple[torch.dtype, bool, int]:
    return torch.get_default_dtype(), torch.is_grad_enabled(), threading.active_count() - _late_threads()


def _late_threads() -> int:
    return sum(isinstance(thread, threading.Timer) for thread in threading.enumerate())


def test_unpicklable_arguments_are_refused_without_damage() -> None:
    with World(1) as world:
        pid = world.run(_sum, 1.0)[0][0]
        with pytest.raises(ConfigurationError, match="cannot send"):
            world.run(lambda: None)
        assert world.run(_sum, 1.0)[0][0] == pid
