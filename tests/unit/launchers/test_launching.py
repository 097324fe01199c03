"""Which launcher starts processes and how, where their store listens, and whom it admits (J-05, J-06)."""

from __future__ import annotations

import ctypes
import doctest
import importlib.machinery
import socket
import sys
import types
import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

# Private: stores and processes that would each need a job of their own, and programs that are not started.
from drivetrain._distributed import rendezvous
from drivetrain._distributed.rendezvous import NO_NAME, admit, admit_first, host
from drivetrain._engine.topology import find_topology
from drivetrain._runtime.accelerators import Devices
from drivetrain.environments import Placement, TorchrunEnvironment
from drivetrain.errors import ConfigurationError
from drivetrain.launchers import FunctionLauncher, SubprocessLauncher, choose_launcher
from drivetrain.launchers import world as launched_world
from drivetrain.launchers._ray_worker import Worker
from drivetrain.launchers._rerun_command import rerun_command
from drivetrain.launchers._script_runners import runner
from drivetrain.launchers.world import World, name_new_job, set_current_world
from drivetrain.testing import requires_linux


def _main(monkeypatch: pytest.MonkeyPatch, file: str | None, spec: str | None = None) -> None:
    main = types.ModuleType("__main__")
    if file is not None:
        main.__file__ = file
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    main.__spec__ = None if spec is None else importlib.machinery.ModuleSpec(spec, None)
    monkeypatch.setitem(sys.modules, "__main__", main)


def _away(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function without pytest's own calls on the stack, as in a script."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def started_by(setting: str) -> str:
    launcher = choose_launcher(setting, 2)
    return launcher.start_method if isinstance(launcher, FunctionLauncher) else type(launcher).__name__


def test_a_setting_names_a_launcher_that_works_here(monkeypatch: pytest.MonkeyPatch) -> None:  # A-06, G-06
    for method in ("spawn", "forkserver", "fork"):
        assert started_by(method) == method
    assert started_by("subprocess") == "SubprocessLauncher"
    with pytest.raises(ConfigurationError, match=r"(?s)launcher='forkservr' is unknown. Did you mean 'forkserver'\?"):
        choose_launcher("forkservr", 2)
    _main(monkeypatch, None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert started_by("auto") == "forkserver"
    with pytest.raises(ConfigurationError, match=r'(?s)launcher="fork" cannot start 2 processes here.*used CUDA'):
        choose_launcher("fork", 2)


def test_auto_runs_scripts_again_unless_other_code_would_run_too(monkeypatch: Any, tmp_path: Path) -> None:  # I-19
    for name in ("train.py", "celery.py"):
        _main(monkeypatch, str(tmp_path / name))
        assert _away(started_by, "auto") == "SubprocessLauncher"
    refused = "runs this code among other code, which a second start would run"
    for file, spec in (("bin/pytest", None), ("unittest/__main__.py", "unittest.__main__"), ("bin/gunicorn", None)):
        _main(monkeypatch, str(tmp_path / file), spec)
        assert _away(started_by, "auto") == "fork"
        with pytest.raises(ConfigurationError, match=refused):
            _away(rerun_command)
    _main(monkeypatch, __file__)
    assert started_by("auto") == "fork"  # here, pytest's own calls are on the stack
    with pytest.raises(ConfigurationError, match=refused):
        rerun_command()


def test_other_test_runners_are_recognised_by_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:  # I-19
    found: list[str | None] = []

    class Test(unittest.TestCase):
        def test(self) -> None:
            found.append(runner())

    def by_doctest() -> None:
        example = doctest.DocTestParser().get_doctest(">>> found.append(runner())", globs, "example", None, 0)
        doctest.DocTestRunner(verbose=False).run(example)

    globs = {"found": found, "runner": runner}
    _main(monkeypatch, __file__)
    _away(Test("test").debug)
    _away(by_doctest)
    assert found == ["unittest", "doctest"]
    assert _away(runner) is None
    assert runner() == "pytest"


def test_autograd_s_threads_forbid_forking(monkeypatch: pytest.MonkeyPatch) -> None:  # I-19
    # A backward pass starts these threads if there is an accelerator, and a forked copy's backward pass would raise.
    _main(monkeypatch, None)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ctypes.CDLL(None).prctl, 15, b"pt_autograd_0", 0, 0, 0).result()  # names the thread
        assert started_by("auto") == "forkserver"
        with pytest.raises(ConfigurationError, match="autograd's device threads"):
            choose_launcher("fork", 2)


def test_auto_starts_a_function_in_an_interactive_session(monkeypatch: pytest.MonkeyPatch) -> None:
    _main(monkeypatch, None)
    assert started_by("auto") == "fork"
    _main(monkeypatch, __file__)
    with monkeypatch.context() as interactive:
        interactive.setattr(sys, "ps1", ">>> ", raising=False)
        assert _away(started_by, "auto") == "fork"
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert _away(started_by, "auto") == "fork"


def test_the_command_of_a_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    programs = {None: [__file__], "package.__main__": ["-m", "package"], "asv.train": ["-m", "asv.train"]}
    monkeypatch.setattr(sys, "argv", ["relative/name.py", "--lr", "0.1"])
    for spec, program in programs.items():
        _main(monkeypatch, __file__, spec)
        command = _away(rerun_command)
        assert command[0] == sys.executable
        assert command[-2 - len(program) :] == [*program, "--lr", "0.1"]
    _main(monkeypatch, str(tmp_path / "__main__.py"), "__main__")
    monkeypatch.setattr(sys, "argv", [str(tmp_path)])
    assert _away(rerun_command)[-1] == str(tmp_path)  # a folder


def test_a_program_without_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:  # G-06
    typed = "standard input, a REPL or a notebook"
    for file, argv, reason in ((None, "-c", "it comes from python -c"), (None, "", typed), ("<stdin>", "-", typed)):
        _main(monkeypatch, None)
        if file is not None:
            sys.modules["__main__"].__file__ = file
        monkeypatch.setattr(sys, "argv", [argv])
        with pytest.raises(ConfigurationError, match=reason) as caught:
            rerun_command()
        assert "put the program into a file" in caught.value.fix


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
