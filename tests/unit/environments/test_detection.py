"""Rank and world size from the variables that launchers and clusters set."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drivetrain.environments import (
    Environment,
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
from drivetrain.errors import ConfigurationError


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
    OMPI_COMM_WORLD_RANK=7 OMPI_COMM_WORLD_SIZE=12
    """,
    LSB_MCPU_HOSTS="batch5 1 h36n04 42 h36n05 42",
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
def test_environments_are_detected(
    variables: dict[str, str], kind: type[Environment], placement: Placement, address: str
) -> None:
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


def test_torchrun_states_who_hosts_the_store() -> None:
    environment = TorchrunEnvironment(_TORCHRUN)
    assert environment.agent_hosts_store
    assert environment.restart_count == 2
    assert environment.main_port == 29400
    assert not TorchrunEnvironment(_TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_hosts_store
    assert not SlurmEnvironment(_SLURM).agent_hosts_store
    with pytest.raises(ConfigurationError, match="MASTER_PORT=65536 is not a port"):  # G-06
        _ = TorchrunEnvironment(_TORCHRUN | {"MASTER_PORT": "65536"}).main_port


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
        ("slurm", _SLURM | {"SLURM_STEP_NUM_TASKS": "8"}, r"SLURM_STEP_TASKS_PER_NODE=2\(x3\),1.*cannot be right"),
        ("slurm", _SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, r"SLURM_STEP_TASKS_PER_NODE=2\(x.*cannot be right"),
        ("slurm", _SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"}, r"SLURM_STEP_TASKS_PER_NODE=two.*cannot be right"),
        ("slurm", _SLURM | {"SLURM_NODEID": "4"}, r"SLURM_NODEID=4 cannot be right"),
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


def test_addresses_and_ports_under_mpi() -> None:
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


def test_lsf_hosts(tmp_path: Path) -> None:
    file = tmp_path / "ranks"
    file.write_text("launch1\n" + "node07\n" * 6 + "node08\n" * 6)
    assert LSFEnvironment(_LSF | {"LSB_DJOB_RANKFILE": str(file)}).main_address == "node07"
    assert LSFEnvironment(_LSF | {"LSB_MCPU_HOSTS": "node07 6 node08 6"}).main_address == "node07"  # no launch node
    with pytest.raises(ConfigurationError, match="LSB_DJOB_RANKFILE nor LSB_MCPU_HOSTS"):
        _ = LSFEnvironment(_without(_LSF, "LSB_MCPU_HOSTS")).main_address


def test_plain_processes_on_several_nodes() -> None:
    variables = {"MASTER_ADDR": "host0", "MASTER_PORT": "1234", "NODE_RANK": "2"}
    assert PlainEnvironment(variables).first_placement_on_node(3, 4) == Placement(8, 12, 0, 4, 2, 3)
    assert PlainEnvironment({}).first_placement_on_node(1, 4) == Placement(0, 4, 0, 4, 0, 1)
    for name in variables:
        with pytest.raises(ConfigurationError, match=f"num_nodes=3, but {name} is not set"):
            PlainEnvironment(_without(variables, name)).first_placement_on_node(3, 4)
    with pytest.raises(ConfigurationError, match="NODE_RANK=2 cannot be right"):
        PlainEnvironment(variables).first_placement_on_node(2, 4)
