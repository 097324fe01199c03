"""Where the store listens and which processes it admits (J-05, J-06), with real stores in one process."""

from __future__ import annotations

import socket
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

# Private: stores and processes that would each need a job of their own.
from drivetrain._distributed import rendezvous
from drivetrain._distributed.rendezvous import NO_NAME, admit, admit_first, host
from drivetrain._engine.topology import find_topology
from drivetrain._runtime.accelerators import Devices
from drivetrain.environments import Placement, TorchrunEnvironment
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import FunctionLauncher, SubprocessLauncher
from drivetrain.launchers import world as launched_world
from drivetrain.launchers._ray_worker import Worker
from drivetrain.launchers.world import World, name_new_job, set_current_world
from drivetrain.testing import requires_linux


def answers(port: int, address: str = "127.0.0.2") -> bool:
    """Return True if a socket listens on the port at another address of this machine."""
    try:
        socket.create_connection((address, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


def _place(port: int, rank: int = 0, **more: str) -> Any:
    """Return the topology of one of two ranks with the variables that torchrun sets."""
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment = TorchrunEnvironment({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **variables, **more})
    return find_topology(environment, Devices("cpu", (0,), chosen=False), 1, strategy=None)


class _Script(SubprocessLauncher):
    def command(self) -> list[str]:
        return []  # starts no process

    def host(self, port: int) -> Any:
        try:
            return self.launch(Placement(), port=port)
        finally:
            set_current_world(None)


@requires_linux()
@pytest.mark.parametrize(
    "hosting", [partial(host, "127.0.0.1"), _Script().host, _place], ids=["store", "script", "rank 0"]
)
def test_the_store_listens_at_the_given_address_and_a_taken_port_is_named(hosting: Any) -> None:  # J-05, J-06
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.1:{port}: port {port} is taken") as caught:
            hosting(port)
        assert "MASTER_PORT" in caught.value.fix
        with pytest.raises(ConfigurationError, match=f"port {port} is taken"):
            FunctionLauncher("fork").launch(Placement(), int, port=port)
    _kept = hosting(port)
    assert answers(port, "127.0.0.1")
    assert not answers(port)


@requires_linux()
def test_a_worker_of_rays_listens_at_its_address_and_a_name_is_resolved() -> None:  # J-06
    worker, store = Worker(), host("localhost", 0, num_nodes=2)
    assert TCPStore("localhost", store.port, is_master=False).check(["x"]) is False
    for port in (worker.host("127.0.0.1"), store.port):
        assert answers(port, "127.0.0.1")
        assert not answers(port)


def test_for_a_foreign_address_it_listens_on_all_interfaces_and_an_unknown_one_is_named() -> None:
    port = _free_port()
    with closing(rendezvous.listen("192.0.2.1", port, 1)):  # an address that leads here, such as a gateway's
        assert answers(port, "127.0.0.1")
        assert answers(port)
    # A machine's own name may resolve to its loopback device, which other machines cannot reach.
    with closing(rendezvous.listen(socket.gethostname(), port, 2)):
        assert answers(port, "127.0.0.1")
    with pytest.raises(ConfigurationError, match=r"cannot host the store at no\.such\.host\.invalid:0: .*[Nn]ame"):
        host("no.such.host.invalid", 0)


@pytest.mark.parametrize(
    ("hosts", "comes", "why"),
    [
        ("a", "b", "the other job is 'a', and this job is 'b'"),
        ("a", NO_NAME, "the other job is 'a', and this job is a job without a name"),
        (NO_NAME, "b", "the other job is a job without a name, and this job is 'b'"),
        pytest.param(name_new_job(Placement()), name_new_job(Placement()), "and this job is", id="without a cluster"),
    ],
)
def test_two_jobs_are_distinguished(hosts: str, comes: str, why: str) -> None:  # J-05
    store = host("127.0.0.1", 0, job=hosts)
    newcomer = TCPStore("127.0.0.1", store.port, is_master=False)
    joins = [partial(one, newcomer, comes, 1, "127.0.0.1", store.port) for one in (admit, admit_first)]
    joins.append(partial(_place, store.port, 1, TORCHELASTIC_RUN_ID="none" if comes == NO_NAME else comes))
    for join in joins:
        with pytest.raises(ConfigurationError, match=rf"rank 1 connected to 127\.0\.0\.1:{store.port}") as caught:
            join()
        assert f"port {store.port}" in caught.value.why
        assert why in caught.value.why
        assert "MASTER_PORT" in caught.value.fix
    admit(newcomer, hosts, 1, "127.0.0.1", store.port)  # the rank is still free


def test_a_rank_is_refused_a_second_time_or_by_a_foreign_store(monkeypatch: pytest.MonkeyPatch) -> None:  # J-05
    store = host("127.0.0.1", 0, job=NO_NAME)
    client = TCPStore("127.0.0.1", store.port, is_master=False)
    for rank in (1, 2):
        admit(client, NO_NAME, rank, "127.0.0.1", store.port)
    with pytest.raises(ConfigurationError, match="where another process is already rank 1"):
        admit(client, NO_NAME, 1, "127.0.0.1", store.port)
    monkeypatch.setattr(rendezvous, "_JOB_KEY_TIMEOUT", rendezvous._JOB_KEY_TIMEOUT / 600)
    foreign = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.1:{foreign.port}, which is not the store of this"):
        admit(foreign, NO_NAME, 1, "127.0.0.1", foreign.port)


def test_a_store_that_outlives_a_rank_admits_it_again() -> None:  # J-05
    outliving = host("127.0.0.1", 0)
    for _ in range(2):
        admit_first(outliving, "run 3", 1, "127.0.0.1", outliving.port)
    with pytest.raises(ConfigurationError, match="another job"):
        admit_first(outliving, "run 4", 0, "127.0.0.1", outliving.port)


def test_a_process_keeps_its_store_and_renews_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = _free_port()
    first = _place(port)
    monkeypatch.chdir(tmp_path)
    first.store.set("x", "y")
    assert _place(port).store.get("x") == b"y"  # although the directory has changed
    port = _free_port()
    for value in (b"first", b"second"):
        store = host("127.0.0.1", port)  # the agent of torchrun hosts it, and may be started again
        rank = _place(port, 1, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="run")
        rank.store.set("x", value)
        assert rank.store.get("x") == value
        del store


def test_a_refused_process_does_not_try_again(monkeypatch: pytest.MonkeyPatch) -> None:  # G-01, J-05
    connect = Mock(wraps=TCPStore)
    monkeypatch.setattr(launched_world, "TCPStore", connect)
    monkeypatch.setattr(launched_world, "_CONNECT_LIMIT_ONE_NODE", timedelta(seconds=0.1))
    store = host("127.0.0.1", 0, job="a")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports: dict[int, Any] = {free.getsockname()[1]: RuntimeError, store.port: ConfigurationError}
        for port, error in ports.items():
            world = World("function", Placement(1, 2, 1, 2), "127.0.0.1", port, job="b")
            for _ in range(2):
                with pytest.raises(error, match=r"timed out|another job"):
                    world.store("runs")
            assert world.failures() == []  # queried while the error is reported
    assert connect.call_count == 2
