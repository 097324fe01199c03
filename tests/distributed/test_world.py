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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import Regression, global_batches, loader, quiet, train_by_hand, weights

from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError, DistributedError
from drivetrain.launchers import FunctionLauncher, RankFailedError, current_processes, torchrun_variables
from drivetrain.testing import World, run_distributed
from worlds import free_port

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


def test_calls_go_to_the_same_processes_and_those_of_run_distributed_to_new_ones() -> None:
    with World(2) as world:
        pids = _pids(world)
        second = world.run(_sum, 2.0)
    # A later import of dynamo would keep the group's threads alive.
    assert second == [(pids[0], 0, 6.0, True), (pids[1], 1, 6.0, True)]
    _assert_gone(pids)
    new = run_distributed(_sum, 3, 2.0)
    assert [(rank, total) for _, rank, total, _ in new] == [(0, 12.0), (1, 12.0), (2, 12.0)]
    _assert_gone([pid for pid, *_ in new])


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


def test_a_call_sees_the_callers_environment_modules_and_torchruns_variables(tmp_path: Path, monkeypatch: Any) -> None:
    names = ["DRIVETRAIN_TEST_CALL", *_TORCHRUN]
    before, variables = os.getcwd(), dict(os.environ)
    (tmp_path / "made_later.py").write_text("def one():\n    return 1\n")
    with World(2) as world:
        assert world.run(_surroundings, names) == [([None] * 6, before, True)] * 2
        monkeypatch.setenv("DRIVETRAIN_TEST_CALL", "second")
        monkeypatch.chdir(tmp_path)
        of_ranks = [["second", rank, rank, "2", "2", "True"] for rank in ("0", "1")]
        assert world.run(_surroundings, names, process_group=None) == [(one, str(tmp_path), False) for one in of_ranks]
        assert world.run(_own_group, process_group=None) == [2.0, 2.0]
        monkeypatch.syspath_prepend(str(tmp_path))
        import made_later  # type: ignore[import-not-found]

        assert world.run(made_later.one) == [1, 1]
        monkeypatch.undo()
        assert world.run(_surroundings, names) == [([None] * 6, before, True)] * 2
        [(first, *_), _] = world.run(_surroundings, names[:1], env={"DRIVETRAIN_TEST_CALL": "x"})
        assert first == ["x"]
    assert dict(os.environ) == variables


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


def test_a_rank_that_died_between_calls_is_replaced_and_one_that_cannot_get_the_function_is_not() -> None:
    with World(1) as world:
        [pid] = _pids(world)
        with pytest.raises(ConfigurationError, match=r"(?s)cannot send.*Fix: use a function at the top level"):
            world.run(lambda: None)
        assert _pids(world) == [pid]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankFailedError, match="Rank 0 was killed by SIGKILL"):
            world.run(_sum, 1.0)
        assert _pids(world) != [pid]


_LEFT: dict[str, Callable[[], object]] = {
    "a default process group": lambda: dist.init_process_group("gloo"),
    "changed environment variables: LEFT_BEHIND": lambda: os.environ.update(LEFT_BEHIND="1"),
    "another default dtype": lambda: torch.set_default_dtype(torch.float64),
    "another grad mode": lambda: torch.set_grad_enabled(False),
    "the thread 'sleeper'": lambda: threading.Thread(target=time.sleep, args=(60,), name="sleeper").start(),
    "the child process 'napper'": lambda: (
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), name="napper").start()
    ),
}


def _leave(what: str) -> None:
    _LEFT[what]()


def _defaults() -> tuple[torch.dtype, bool, int]:
    late = sum(isinstance(thread, threading.Timer) for thread in threading.enumerate())
    return torch.get_default_dtype(), torch.is_grad_enabled(), threading.active_count() - late


def test_state_left_behind_is_an_error_and_removed() -> None:
    with World(1) as world:
        for what in _LEFT:
            with pytest.raises(DistributedError, match=f"Rank 0 returned but left behind {what}"):
                world.run(_leave, what, process_group=None)
            ((names, _, initialized),) = world.run(_surroundings, ["LEFT_BEHIND"], process_group=None)
            assert (names, initialized) == ([None], False), what
            assert world.run(_defaults) == [(torch.float32, True, 2)], what  # one thread watches the parent


def _meet() -> str:
    world = current_processes()
    assert world is not None
    rank, store = os.environ["RANK"], world.store("test")
    store.set(rank, "here")
    store.wait(["0", "1"])
    store.set(f"{rank} met", "")
    if rank == "0":  # the store ends with the caller of this rank
        store.wait(["1 met"])
    return rank


def _node_of_two(folder: str, port: int) -> str:
    """Start node 0, a node 1 of another job, and node 1, each of which starts its own process."""
    number = int(os.environ["RANK"])
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "GROUP", "ROLE"))]:
        del os.environ[name]
    while number == 2 and not Path(folder, "refused").exists():
        time.sleep(0.01)
    node = min(number, 1)
    place = Placement(node, 2, 0, 1, node, 2, port=port, job="B" if number == 1 else "A")
    try:
        return str(FunctionLauncher("fork").call(place, _meet))
    except ConfigurationError as error:
        Path(folder, "refused").touch()
        return str(error)


def test_a_node_of_another_job_is_refused_and_the_jobs_own_node_admitted(tmp_path: Path) -> None:  # J-05
    port = free_port()
    first, other, second = run_distributed(_node_of_two, 3, str(tmp_path), port, process_group=None)
    assert (first, second) == ("0", "1")
    assert f"rank 1 connected to 127.0.0.1:{port}, where the processes of another job meet" in other


def _train_on_a_node(port: int) -> Any:
    node = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": os.environ["RANK"]}
    for name in torchrun_variables(Placement()):
        del os.environ[name]
    os.environ.update(node)
    module, fit = Regression(), quiet(strategy="ddp", devices=1, num_nodes=2, launcher="fork")
    fit.fit(module, loader(64, 4))
    return weights(module), fit.global_rank


def test_the_caller_on_each_node_gets_the_trained_module() -> None:  # I-15
    reference = weights(train_by_hand(Regression(), global_batches(64, 8)))
    for node, (found, rank) in enumerate(run_distributed(_train_on_a_node, 2, free_port(), process_group=None)):
        assert torch.allclose(found, reference, atol=1e-6)
        assert rank == node
