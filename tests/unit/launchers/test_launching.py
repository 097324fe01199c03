"""Ranks from the environment, which launcher starts processes, and where their store listens (J-05, J-06)."""

from __future__ import annotations

import ctypes
import doctest
import importlib.machinery
import os
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

from drivetrain._distributed import rendezvous
from drivetrain._distributed.rendezvous import NO_NAME, admit, admit_first, host, name_new_job
from drivetrain._engine.ranks.run_processes import find_processes
from drivetrain._runtime.accelerators import Devices
from drivetrain.environments import (
    KubeflowEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    Placement,
    PlainEnvironment,
    SlurmEnvironment,
    TorchrunEnvironment,
    detect_environment,
    environment_by_name,
)
from drivetrain.errors import ConfigurationError, DistributedError
from drivetrain.launchers import FunctionLauncher, SubprocessLauncher, choose_launcher
from drivetrain.launchers import launched_processes as launched_world
from drivetrain.launchers._rerun_command import rerun_command, runner
from drivetrain.launchers.launched_processes import LaunchedProcesses, set_current_processes
from drivetrain.launchers.ray_launcher import Worker
from drivetrain.testing import requires_linux
from worlds import free_port


def variables_of(text: str, **more: str) -> dict[str, str]:
    """Return variables written as in a shell."""
    return dict(pair.split("=", 1) for pair in text.split()) | more


_TORCHRUN = variables_of("""
    RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=host0
    MASTER_PORT=29400 TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_RUN_ID=none
""")
_SLURM = variables_of("""
    SLURM_JOB_ID=123456 SLURM_JOB_NAME=train SLURM_STEP_ID=0 SLURM_PROCID=6 SLURM_LOCALID=0 SLURM_NODEID=3
    SLURM_NTASKS=7 SLURM_STEP_NUM_TASKS=7 SLURM_STEP_NUM_NODES=4 SLURM_NNODES=4 SLURM_STEP_TASKS_PER_NODE=2(x3),1
    SLURM_TASKS_PER_NODE=2(x3),1 SLURM_STEP_NODELIST=gpu[008-010],login1
""")
_OPEN_MPI = variables_of("""
    OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2
    PMIX_NAMESPACE=prterun-host-77@1 MASTER_ADDR=host0
""")
_IN_TURN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}  # ranks that alternate between nodes
_MPICH = variables_of("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 MASTER_PORT=2345")
_MVAPICH = variables_of("""
    MV2_COMM_WORLD_RANK=2 MV2_COMM_WORLD_SIZE=3 MV2_COMM_WORLD_LOCAL_RANK=2 MV2_COMM_WORLD_LOCAL_SIZE=3
""")
_LSF = variables_of(
    """
    LSB_JOBID=99 JSM_NAMESPACE_RANK=7 JSM_NAMESPACE_SIZE=12 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=6
    OMPI_COMM_WORLD_RANK=7 OMPI_COMM_WORLD_SIZE=12 MASTER_ADDR=h36n04
    """
)
_KUBEFLOW = variables_of("""
    KUBERNETES_PORT=tcp://10.0.0.1:443 RANK=2 WORLD_SIZE=3 MASTER_ADDR=job-master-0 MASTER_PORT=23456
""")


@pytest.mark.parametrize(
    ("variables", "kind", "placement", "address"),
    [
        ({}, PlainEnvironment, Placement(), "127.0.0.1"),
        (_TORCHRUN, TorchrunEnvironment, Placement(5, 8, 1, 4, 1, 2), "host0"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, TorchrunEnvironment, Placement(), "127.0.0.1"),
        (_SLURM, SlurmEnvironment, Placement(6, 7, 0, 1, 3, 4), "gpu008"),
        (_OPEN_MPI, MPIEnvironment, Placement(3, 4, 1, 2, 1, 2), "host0"),
        (_OPEN_MPI | _IN_TURN, MPIEnvironment, Placement(1, 4, 0, 2, 1, 2), "host0"),
        (_MPICH, MPIEnvironment, Placement(1, 2, 1, 2, 0, 1), "127.0.0.1"),
        (_MVAPICH, MPIEnvironment, Placement(2, 3, 2, 3, 0, 1), "127.0.0.1"),
        (_LSF, LSFEnvironment, Placement(7, 12, 1, 6, 1, 2), "h36n04"),
        (_KUBEFLOW, KubeflowEnvironment, Placement(2, 3, 0, 1, 2, 3), "job-master-0"),
        # If one launcher runs inside another, the inner one started the processes.
        (_SLURM | _TORCHRUN, TorchrunEnvironment, Placement(5, 8, 1, 4, 1, 2), "host0"),
        (_KUBEFLOW | _TORCHRUN, TorchrunEnvironment, Placement(5, 8, 1, 4, 1, 2), "host0"),
        (_SLURM | _OPEN_MPI, MPIEnvironment, Placement(3, 4, 1, 2, 1, 2), "host0"),
        (_SLURM | {"PMI_RANK": "6", "PMI_SIZE": "7"}, SlurmEnvironment, Placement(6, 7, 0, 1, 3, 4), "gpu008"),
    ],
)
def test_environments_are_detected(variables: dict[str, str], kind: Any, placement: Placement, address: str) -> None:
    environment = detect_environment(variables)
    assert type(environment) is kind
    assert environment.placement() == placement
    assert environment.main_address == address
    assert environment.started_processes is (kind is not PlainEnvironment)


def test_names_and_nearest_names_and_detection_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:  # A-03, G-06
    for kind in (PlainEnvironment, TorchrunEnvironment, SlurmEnvironment, MPIEnvironment, LSFEnvironment):
        assert type(environment_by_name(kind.name, {})) is kind
    assert isinstance(environment_by_name("auto", _SLURM), SlurmEnvironment)
    unknown = r"(?s)environment='slrum' is unknown. Did you mean 'slurm'\?.*kubeflow"
    with pytest.raises(ConfigurationError, match=unknown):
        environment_by_name("slrum", {})
    assert isinstance(detect_environment(), PlainEnvironment)
    for name, value in _TORCHRUN.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert detect_environment().placement().rank == 5
    assert dict(os.environ) == before


_JOB = variables_of("SLURM_JOB_ID=123456 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_NAME=train")
_ONE_TASK = variables_of("SLURM_NTASKS=1 SLURM_STEP_NUM_TASKS=1 SLURM_NNODES=1")
_FOUR_TASKS = variables_of("SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4 SLURM_NNODES=1")
_PTY = {"SLURM_PTY_PORT": "34567"}
_NO_RANK = variables_of("SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_NTASKS=4")


def _step(number: str, job: str = "train") -> dict[str, str]:
    return {"SLURM_STEP_ID": number, "SLURM_JOB_NAME": job}


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        # The job script runs `python train.py` without srun: the other three tasks do not exist.
        pytest.param(_JOB | {"SLURM_NTASKS": "4"}, 0, id="sbatch without srun"),
        pytest.param(_JOB | _FOUR_TASKS | _step("4294967290", "interactive"), 0, id="salloc's step"),
        pytest.param(_JOB | _ONE_TASK | _step("0", "bash"), 0, id="srun --pty bash"),
        pytest.param(_JOB | _FOUR_TASKS | _step("0", "bash") | _PTY, 0, id="srun -n 4 --pty bash"),
        pytest.param(_JOB | _step("0"), 0, id="no number of tasks"),
        pytest.param(_NO_RANK, 0, id="no rank"),
        pytest.param(_JOB | _FOUR_TASKS | _step("0"), 4, id="srun in a job script"),
        pytest.param(_JOB | _FOUR_TASKS | _step("0", "interactive"), 4, id="srun in salloc's shell"),
        pytest.param(
            _JOB | _FOUR_TASKS | _PTY | {"SLURM_STEPID": "1", "SLURM_JOB_NAME": "bash"}, 4, id="srun in srun's shell"
        ),
    ],
)
def test_slurm_is_detected_only_in_processes_that_srun_started(variables: dict[str, str], ranks: int) -> None:
    environment = detect_environment(variables)
    assert isinstance(environment, SlurmEnvironment if ranks else PlainEnvironment)
    assert environment.placement().local_world_size == max(ranks, 1)


def test_a_process_without_a_device_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:  # A-06, O-01
    devices, visible = Devices("cuda", (2,), chosen=False), Mock(return_value=2)
    monkeypatch.setattr(torch.cuda, "device_count", visible)
    assert devices.of(0) == torch.device("cuda", 2)
    with pytest.raises(ConfigurationError, match=r"(?s)Process 1 of this node has no device .*start 1 process"):
        devices.of(1)
    visible.return_value = 1  # a job scheduler shows each process one device, which is its own
    assert devices.of(1) == torch.device("cuda", 0)


def test_slurms_first_node_hosts_the_store_at_a_port_of_the_step() -> None:
    firsts = {"host0": "host0", "host0,host1": "host0", "gpu[008-010,012]": "gpu008", "login1,gpu[3,5-7]": "login1"}
    firsts |= {"rack[1-2]n[03-05,9],gpu7": "rack1n03", "n[1-2]-ib": "n1-ib"}
    for nodes, node in firsts.items():
        assert SlurmEnvironment(_SLURM | {"SLURM_STEP_NODELIST": nodes}).main_address == node
    first = SlurmEnvironment(_JOB | _step("0"))
    second = SlurmEnvironment(_JOB | _step("1") | {"SLURM_RESTART_COUNT": "3"})
    assert first.main_port == SlurmEnvironment(_JOB | _step("0") | {"SLURM_PROCID": "3"}).main_port
    assert first.main_port != second.main_port
    assert (first.restart_count, second.restart_count) == (0, 3)


def test_a_job_is_identified_by_its_starter() -> None:  # J-05
    assert TorchrunEnvironment({"TORCHELASTIC_RUN_ID": "x"}).job == "x"
    assert TorchrunEnvironment({"TORCHELASTIC_RUN_ID": "none"}).job is None
    assert PlainEnvironment({"TORCHELASTIC_RUN_ID": "x"}).job == "x"
    assert SlurmEnvironment({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}).job == "SLURM's job 12, step 3"
    assert MPIEnvironment({"PMIX_NAMESPACE": "77"}).job == "MPI's job 77"
    assert MPIEnvironment({}).job is None
    assert LSFEnvironment({"LSB_JOBID": "5", "JSM_NAMESPACE_ID": "1"}).job == "LSF's job 5, step 1"


def test_where_the_store_is_under_torchrun_mpi_and_lsf(tmp_path: Path) -> None:
    environment = TorchrunEnvironment(_TORCHRUN)
    assert environment.agent_hosts_store
    assert environment.restart_count == 2
    assert environment.main_port == 29400
    assert not TorchrunEnvironment(_TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_hosts_store
    assert not SlurmEnvironment(_SLURM).agent_hosts_store
    with pytest.raises(ConfigurationError, match=r"(?s)MASTER_ADDR is not set, but the 2 nodes.*mpirun -x MASTER_ADDR"):
        _ = MPIEnvironment(_without(_OPEN_MPI, "MASTER_ADDR")).main_address
    others = _OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    port = MPIEnvironment(_OPEN_MPI).main_port
    assert MPIEnvironment(others).main_port == port
    assert 20_000 <= port < 30_000
    assert MPIEnvironment(_OPEN_MPI | {"PMIX_NAMESPACE": "prterun-host-78@1"}).main_port != port
    assert MPIEnvironment(_MPICH).main_port == 2345
    with pytest.raises(ConfigurationError, match="MASTER_PORT is not set"):
        _ = MPIEnvironment(_MVAPICH).main_port
    file = tmp_path / "ranks"
    file.write_text("launch1\n" + "node07\n" * 6 + "node08\n" * 6)
    in_lsf = _without(_LSF, "MASTER_ADDR")
    assert LSFEnvironment(in_lsf | {"LSB_DJOB_RANKFILE": str(file)}).main_address == "node07"
    with pytest.raises(ConfigurationError, match="LSB_DJOB_RANKFILE is not set"):
        _ = LSFEnvironment(in_lsf).main_address


def _without(variables: dict[str, str], missing: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name != missing}


@pytest.mark.parametrize(
    ("name", "variables", "message"),
    [
        ("torchrun", _without(_TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK is not set"),
        # With only RANK and WORLD_SIZE set by hand, the processes must not run separately.
        ("auto", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "LOCAL_WORLD_SIZE is not set"),
        ("torchrun", {}, "RANK is not set"),
        ("torchrun", _TORCHRUN | {"RANK": "eight"}, "RANK='eight' is not a number"),
        ("torchrun", _TORCHRUN | {"RANK": "8"}, "rank=8 and world_size=8 contradict"),
        ("torchrun", _TORCHRUN | {"LOCAL_RANK": "4"}, "local_rank=4 and local_world_size=4 contradict"),
        ("torchrun", _TORCHRUN | {"GROUP_RANK": "2"}, "node_rank=2 and num_nodes=2 contradict"),
        ("slurm", {}, "SLURM_NODEID is not set"),
        ("slurm", _without(_SLURM, "SLURM_LOCALID"), "SLURM_LOCALID is not set"),
        ("slurm", _SLURM | {"SLURM_NODEID": "4"}, "node_rank=4 and num_nodes=4 contradict"),
        ("mpi", {}, "OMPI_COMM_WORLD_SIZE or MV2_COMM_WORLD_SIZE or PMI_SIZE is not set"),
        ("mpi", _OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "5"}, "rank 3 of 5 is number 1 of 2 on its node"),
        ("lsf", _without(_LSF, "JSM_NAMESPACE_LOCAL_RANK"), "JSM_NAMESPACE_LOCAL_RANK is not set"),
        ("kubeflow", {"RANK": "0"}, "WORLD_SIZE is not set"),
    ],
)
def test_a_missing_or_wrong_variable_is_named(name: str, variables: dict[str, str], message: str) -> None:  # G-06
    with pytest.raises(ConfigurationError, match=message) as caught:
        environment_by_name(name, variables).placement()
    assert caught.value.why
    assert caught.value.fix


def test_plain_processes_on_several_nodes() -> None:
    variables = {"MASTER_ADDR": "host0", "MASTER_PORT": "1234", "NODE_RANK": "2"}
    assert PlainEnvironment(variables).first_placement_on_node(3, 4) == Placement(8, 12, 0, 4, 2, 3)
    assert PlainEnvironment({}).first_placement_on_node(1, 4) == Placement.on_one_node(0, 4)
    for name in variables:
        with pytest.raises(ConfigurationError, match=f"num_nodes=3, but {name} is not set"):
            PlainEnvironment(_without(variables, name)).first_placement_on_node(3, 4)
    with pytest.raises(ConfigurationError, match="contradict each other"):
        PlainEnvironment(variables).first_placement_on_node(2, 4)


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


def test_the_command_of_a_program_and_a_program_without_a_file(monkeypatch: Any, tmp_path: Path) -> None:  # G-06
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


def _place(port: int, rank: int = 0, **more: str) -> Any:
    """Return the processes as seen from one of two ranks with the variables that torchrun sets."""
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment = TorchrunEnvironment({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **variables, **more})
    return find_processes(environment, Devices("cpu", (0,), chosen=False), 1, strategy=None)


class _Script(SubprocessLauncher):
    def command(self) -> list[str]:
        return []  # starts no process

    def host(self, port: int) -> Any:
        try:
            return self.launch(Placement(port=port))
        finally:
            set_current_processes(None)


@requires_linux()
@pytest.mark.parametrize(
    "hosting", [partial(host, "127.0.0.1"), _Script().host, _place], ids=["store", "script", "rank 0"]
)
def test_the_store_listens_at_the_given_address_and_a_taken_port_is_named(hosting: Any) -> None:  # J-05, J-06
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.1:{port}: .*already in use") as caught:
            hosting(port)
        assert "MASTER_PORT" in caught.value.fix
        with pytest.raises(ConfigurationError, match=rf":{port}: .*already in use"):
            FunctionLauncher("fork").call(Placement(port=port), int)
    _kept = hosting(port)
    assert answers(port, "127.0.0.1")
    assert not answers(port)


@requires_linux()
def test_a_worker_of_rays_listens_at_its_address_and_a_name_is_resolved() -> None:  # J-06
    worker, store = Worker(), host("localhost", 0, num_nodes=2)
    assert TCPStore("localhost", store.port, is_master=False).check(["x"]) is False
    for port in (worker.host(Placement()), store.port):
        assert answers(port, "127.0.0.1")
        assert not answers(port)


def test_for_a_foreign_address_it_listens_on_all_interfaces_and_an_unknown_one_is_named() -> None:
    port = free_port()
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
        pytest.param(name_new_job(1), name_new_job(1), "and this job is", id="without a cluster"),
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


def test_a_store_admits_a_rank_once_unless_it_outlives_it_and_only_if_it_is_the_jobs(monkeypatch: Any) -> None:  # J-05
    store = host("127.0.0.1", 0, job=NO_NAME)
    client = TCPStore("127.0.0.1", store.port, is_master=False)
    for rank in (1, 2):
        admit(client, NO_NAME, rank, "127.0.0.1", store.port)
    with pytest.raises(ConfigurationError, match="where another process is already rank 1"):
        admit(client, NO_NAME, 1, "127.0.0.1", store.port)
    monkeypatch.setattr(rendezvous, "_JOB_KEY_TIMEOUT", rendezvous._JOB_KEY_TIMEOUT / 600)
    foreign = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(DistributedError, match=rf"no store of its job at 127\.0\.0\.1:{foreign.port}"):
        rendezvous.connect("127.0.0.1", foreign.port, None, 1, timedelta(seconds=5))
    outliving = host("127.0.0.1", 0)
    for _ in range(2):
        admit_first(outliving, "run 3", 1, "127.0.0.1", outliving.port)
    with pytest.raises(ConfigurationError, match="another job"):
        admit_first(outliving, "run 4", 0, "127.0.0.1", outliving.port)


def test_a_process_keeps_its_store_and_renews_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    first = _place(port)
    monkeypatch.chdir(tmp_path)
    first.store("runs").set("x", "y")
    assert _place(port).store("runs").get("x") == b"y"  # although the directory has changed
    port = free_port()
    for value in (b"first", b"second"):
        store = host("127.0.0.1", port)  # the agent of torchrun hosts it, and may be started again
        rank = _place(port, 1, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="run")
        rank.store("runs").set("x", value)
        assert rank.store("runs").get("x") == value
        del store


def test_a_refused_process_does_not_try_again(monkeypatch: pytest.MonkeyPatch) -> None:  # G-01, J-05
    connect = Mock(wraps=rendezvous.connect)
    monkeypatch.setattr(launched_world, "connect", connect)
    monkeypatch.setattr(launched_world, "_CONNECT_LIMIT_ONE_NODE", timedelta(seconds=0.1))
    store = host("127.0.0.1", 0, job="a")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports: dict[int, Any] = {free.getsockname()[1]: DistributedError, store.port: ConfigurationError}
        for port, error in ports.items():
            world = LaunchedProcesses(Placement(1, 2, 1, 2, port=port, job="b"), "function")
            for _ in range(2):
                with pytest.raises(error, match=r"timed out|another job"):
                    world.store("runs")
            assert world.failures() == []  # queried while the error is reported
    assert connect.call_count == 2
