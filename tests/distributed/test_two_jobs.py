"""Two jobs with the same port: the first one continues, the other one is refused. J-05, with real processes."""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from small_runs import Regression, global_batches, loader, quiet, train_by_hand, weights

from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import FunctionLauncher, current_world
from drivetrain.testing import requires_linux, run_distributed
from worlds import on_ranks


def _is_open(port: int, address: str = "127.0.0.1") -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def _until(holds: Any) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def _of_job(name: str, **variables: object) -> None:
    for variable in [one for one in os.environ if one.startswith(("TORCHELASTIC", "GROUP", "ROLE"))]:
        del os.environ[variable]
    os.environ.update(TORCHELASTIC_RUN_ID=name, **{key: str(value) for key, value in variables.items()})


def _rank_of_two_jobs(folder: str, port: int) -> tuple[str, Any, float]:
    number = int(os.environ["RANK"])
    job, rank = "AB"[number // 2], number % 2
    _of_job(job, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, MASTER_PORT=port)
    newcomers = [Path(folder, name) for name in ("B0", "B1")]
    if job == "B":
        _until(lambda: _is_open(port))
    elif rank == 1:  # the second job's rank 1 connects before this one
        _until(lambda: all(path.exists() for path in newcomers))
    module = Regression()
    began = time.monotonic()
    try:
        quiet(strategy="ddp").fit(module, loader(64, 4))
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - began
    finally:
        Path(folder, f"{job}{rank}").touch()
    return "trained", weights(module), time.monotonic() - began


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


def test_the_second_of_two_jobs_on_one_port_is_refused(tmp_path: Path) -> None:  # J-05
    port = _free_port()
    *first, host, other = run_distributed(_rank_of_two_jobs, 4, str(tmp_path), port, process_group=None)
    reference = weights(train_by_hand(Regression(), global_batches(64, 8)))
    for how, found, _ in first:
        assert how == "trained", found
        assert torch.allclose(found, reference, atol=1e-6)
    assert (host[0], other[0]) == ("ConfigurationError", "ConfigurationError")
    assert f"127.0.0.1:{port}: port {port} is taken" in host[1]
    assert f"rank 1 connected to 127.0.0.1:{port}, where the processes of another job meet" in other[1]
    assert "the other job is 'A', and this job is 'B'" in other[1]
    assert max(host[2], other[2]) < 15  # at the start of the run


def _meets_the_other_node() -> str:
    world = current_world()
    assert world is not None
    store = world.store("test")
    store.set(os.environ["RANK"], "here")
    store.wait(["0", "1"])
    return os.environ["RANK"]


def _node_of_two(folder: str, port: int) -> tuple[str, str]:
    """Start node 0, a node 1 of another job, and node 1, each of which starts its own process."""
    number = int(os.environ["RANK"])
    node = min(number, 1)
    _of_job("B" if number == 1 else "A")
    refused = Path(folder, "refused")
    if number == 2:
        _until(refused.exists)
    placement = Placement(node, 2, 0, 1, node, 2)
    try:
        return "met", FunctionLauncher("fork").launch(placement, _meets_the_other_node, port=port)
    except ConfigurationError as error:
        refused.touch()
        return "refused", str(error)


def test_a_node_of_another_job_is_refused_and_the_jobs_own_node_admitted(tmp_path: Path) -> None:  # J-05
    port = _free_port()
    first, other, second = run_distributed(_node_of_two, 3, str(tmp_path), port, process_group=None)
    assert (first, second) == (("met", "0"), ("met", "1"))
    assert other[0] == "refused"
    assert f"rank 1 connected to 127.0.0.1:{port}, where the processes of another job meet" in other[1]


def _open_elsewhere() -> tuple[bool, bool]:
    port = int(os.environ["MASTER_PORT"])
    return _is_open(port), _is_open(port, "127.0.0.2")


@requires_linux()
def test_the_store_of_one_machine_listens_on_loopback_only() -> None:  # J-06
    assert FunctionLauncher("fork").launch_all(Placement(0, 2, 0, 2), _open_elsewhere) == [(True, False)] * 2
    assert on_ranks(_open_elsewhere, 2, process_group=None) == [(True, False)] * 2
