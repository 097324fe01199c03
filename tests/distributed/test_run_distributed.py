"""`run_distributed`, which most other distributed tests use."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drivetrain._distributed.failure import RankFailedError
from drivetrain.errors import ConfigurationError, DistributedError
from drivetrain.testing import run_distributed
from drivetrain.testing._stack_dump import dump_stacks_to


def _sum(value: float) -> tuple[int, torch.Tensor, int, bool]:
    tensor = torch.full((2,), value * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor, torch.get_num_threads(), "torch._dynamo" in sys.modules


def test_returns_every_ranks_value_by_rank() -> None:
    results = run_distributed(_sum, 3, 2.0)
    assert [rank for rank, *_ in results] == [0, 1, 2]
    for _, tensor, threads, has_dynamo in results:
        assert tensor.tolist() == [12.0, 12.0]
        assert threads == 1
        assert has_dynamo  # a later import of it would keep the group's threads alive


def _own_group() -> tuple[dict[str, str], float]:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    tensor = torch.ones(())
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")
    return {name: os.environ[name] for name in names}, tensor.item()


def test_without_a_group_workers_get_what_torchrun_sets() -> None:
    before = dict(os.environ)
    results = run_distributed(_own_group, 2, process_group=None)
    assert [variables["RANK"] for variables, _ in results] == ["0", "1"]
    assert [variables["LOCAL_RANK"] for variables, _ in results] == ["0", "1"]
    for variables, total in results:
        assert total == 2.0
        assert variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] == "2"
        assert variables["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert dict(os.environ) == before


def _environment(name: str) -> str | None:
    return os.environ.get(name)


def test_workers_see_the_environment_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_TEST_CALL", "first")
    assert run_distributed(_environment, 1, "DRIVETRAIN_TEST_CALL") == ["first"]
    monkeypatch.setenv("DRIVETRAIN_TEST_CALL", "second")
    assert run_distributed(_environment, 1, "DRIVETRAIN_TEST_CALL") == ["second"]
    monkeypatch.delenv("DRIVETRAIN_TEST_CALL")
    assert run_distributed(_environment, 1, "DRIVETRAIN_TEST_CALL") == [None]
    assert run_distributed(_environment, 1, "DRIVETRAIN_TEST_CALL", env={"DRIVETRAIN_TEST_CALL": "x"}) == ["x"]


def _raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("from rank one")
    dist.barrier()


def test_the_failing_ranks_traceback_is_raised() -> None:
    with pytest.raises(RankFailedError, match="Rank 1 failed with ValueError: from rank one") as caught:
        run_distributed(_raise_on_one, 2)
    assert "in _raise_on_one" in str(caught.value)
    assert caught.value.failure.rank == 1


def _die_on_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_is_named_instead_of_its_disconnected_peer() -> None:
    with pytest.raises(RankFailedError, match="Rank 1 was killed by SIGKILL"):
        run_distributed(_die_on_one, 2)


def _wait_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()


def test_a_hang_ends_with_the_stack_of_every_rank() -> None:
    start = time.monotonic()
    with pytest.raises(DistributedError, match=r"(?s)Rank 0, 1 of 2 did not return within 1 s.*_wait_on_one"):
        run_distributed(_wait_on_one, 2, timeout=1)
    assert time.monotonic() - start < 40  # less than the minute that one of them sleeps


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
    (told,) = run_distributed(_busy_when_time_is_up, 1, str(tmp_path), 200, process_group=None)
    assert all("_busy_when_time_is_up" in text and "late.py" not in text.splitlines()[1] for text in told)


def _hold_the_lock() -> None:
    ctypes.PyDLL(None).sleep(60)


def test_a_rank_that_hangs_while_holding_the_gil_is_reported() -> None:
    with pytest.raises(DistributedError, match=r"(?s)Rank 0 of 1 did not return within 1 s.*_hold_the_lock"):
        run_distributed(_hold_the_lock, 1, timeout=1, process_group=None)


def _pid_then_hang(folder: str) -> None:
    with open(os.path.join(folder, str(dist.get_rank())), "w") as file:
        file.write(str(os.getpid()))
    dist.barrier()
    if dist.get_rank() == 0:
        raise ValueError("gone")
    time.sleep(60)


def test_no_process_is_left_after_a_failure(tmp_path: os.PathLike[str]) -> None:
    with pytest.raises(RankFailedError, match="gone"):
        run_distributed(_pid_then_hang, 2, str(tmp_path))
    for rank in ("0", "1"):
        with open(os.path.join(tmp_path, rank)) as file, pytest.raises(ProcessLookupError):
            os.kill(int(file.read()), 0)


def test_unpicklable_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)cannot send.*Fix: use a function at the top level"):
        run_distributed(lambda: None, 2)


def _unpicklable() -> object:
    return lambda: None


def test_a_result_that_cannot_be_returned_names_the_rank() -> None:
    with pytest.raises(RankFailedError, match=r"Rank 0 failed with .*(pickle|get) local object"):
        run_distributed(_unpicklable, 1)


def _exit() -> None:
    sys.exit(3)


def test_an_exit_is_a_failure() -> None:
    with pytest.raises(RankFailedError, match="Rank 0 failed with SystemExit: 3"):
        run_distributed(_exit, 1)
