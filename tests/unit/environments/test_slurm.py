from __future__ import annotations

from typing import Any

import pytest

from drivetrain.environments import PlainEnvironment, SlurmEnvironment, detect_environment
from drivetrain.environments.slurm import first_node, parse_tasks_per_node

_JOB = {"SLURM_JOB_ID": "123456", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
_ONE_TASK = {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NNODES": "1"}
_FOUR_TASKS = {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NNODES": "1"}


@pytest.mark.parametrize(
    ("what", "variables"),
    [
        # The job script runs `python train.py` without srun: the other three tasks do not exist.
        ("sbatch without srun", _JOB | {"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "train"}),
        ("salloc's shell", _JOB | {"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "interactive"}),
        ("salloc's step", _JOB | _FOUR_TASKS | {"SLURM_STEP_ID": "4294967290", "SLURM_JOB_NAME": "interactive"}),
        ("srun --pty bash", _JOB | _ONE_TASK | {"SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "bash"}),
        (
            "srun -n 4 --pty bash",
            _JOB | _FOUR_TASKS | {"SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "34567"},
        ),
        ("no number of tasks", _JOB | {"SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "train"}),
        ("no rank", {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}),
    ],
)
def test_a_process_that_srun_did_not_start_is_plain(what: str, variables: dict[str, str]) -> None:
    assert isinstance(detect_environment(variables), PlainEnvironment), what


@pytest.mark.parametrize(
    ("what", "variables"),
    [
        ("srun in a job script", {"SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "train"}),
        ("srun in salloc's shell", {"SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "interactive"}),
        (
            "srun in a shell that srun opened",
            {"SLURM_STEPID": "1", "SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "34567"},
        ),
    ],
)
def test_a_process_that_srun_started_is_of_slurm(what: str, variables: dict[str, str]) -> None:
    environment = detect_environment(_JOB | _FOUR_TASKS | variables)
    assert isinstance(environment, SlurmEnvironment), what
    assert environment.placement().local_world_size == 4


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (first_node, "host0", "host0"),
        (first_node, "host0,host1", "host0"),
        (first_node, "gpu[008-010,012]", "gpu008"),
        (first_node, "login1,gpu[3,5-7]", "login1"),
        (first_node, "rack[1-2]n[03-05,9],gpu7", "rack1n03"),
        (first_node, "n[1-2]-ib", "n1-ib"),
        (parse_tasks_per_node, "4", [4]),
        (parse_tasks_per_node, "2(x3),1", [2, 2, 2, 1]),
        (parse_tasks_per_node, "", []),
        (parse_tasks_per_node, "2(x", []),
        (parse_tasks_per_node, "a", []),
    ],
)
def test_nodes_and_tasks_are_read(read: Any, text: str, expected: Any) -> None:
    assert read(text) == expected


def test_ports_differ_between_steps_and_restarts_are_counted() -> None:
    first = SlurmEnvironment(_JOB | {"SLURM_STEP_ID": "0"})
    second = SlurmEnvironment(_JOB | {"SLURM_STEP_ID": "1", "SLURM_RESTART_COUNT": "3"})
    assert first.main_port == SlurmEnvironment(_JOB | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}).main_port
    assert first.main_port != second.main_port
    assert (first.restart_count, second.restart_count) == (0, 3)
