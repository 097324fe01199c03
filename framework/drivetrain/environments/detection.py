"""Detects the environment of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping

from drivetrain._config.entry_points import EntryPointRegistry
from drivetrain.environments.environment import Environment
from drivetrain.environments.lsf import LSFEnvironment
from drivetrain.environments.mpi import VARIABLE_FAMILIES, MPIEnvironment
from drivetrain.environments.plain import PlainEnvironment
from drivetrain.environments.slurm import SlurmEnvironment
from drivetrain.environments.torchrun import KubeflowEnvironment, TorchrunEnvironment

_ENVIRONMENTS: tuple[type[Environment], ...] = (
    KubeflowEnvironment,
    TorchrunEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SlurmEnvironment,
    PlainEnvironment,
)

_INTERACTIVE_STEP = "4294967290"  # SLURM_INTERACTIVE_STEP in slurm.h, the step of the shell that salloc opens
_SHELL_JOB_NAMES = frozenset({"bash", "sh", "zsh", "fish", "csh", "tcsh", "interactive", "ipython", "jupyter"})

_REGISTRY = EntryPointRegistry[Environment](
    "environment",
    "drivetrain.environments",
    Environment,  # type: ignore[type-abstract]
    {kind.name: kind for kind in _ENVIRONMENTS},
    meaning="the name selects the launcher or cluster that started the processes",
    alternatives="an Environment object",
)


def detect_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Return the built-in environment that this process is in.

    Args:
        variables: the variables to read instead of ``os.environ``.
    """
    variables = os.environ if variables is None else variables
    return _kind_of(variables)(variables)


def _kind_of(variables: Mapping[str, str]) -> type[Environment]:
    """Return the innermost launcher: torchrun under srun counts as torchrun, mpirun in a SLURM job as MPI."""

    def are_set(*names: str) -> bool:
        return all(variables.get(name) for name in names)

    if are_set("RANK", "WORLD_SIZE"):
        # The variables of a PyTorchJob are a subset of torchrun's. Its pods may also run torchrun.
        is_pod = are_set("KUBERNETES_PORT", "MASTER_ADDR", "MASTER_PORT")
        in_torchrun = any(name in variables for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"))
        return KubeflowEnvironment if is_pod and not in_torchrun else TorchrunEnvironment
    # LSF comes before MPI, because jsrun also sets variables of Open MPI. A job script of LSF lacks those of jsrun.
    if are_set("LSB_JOBID", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"):
        return LSFEnvironment
    in_slurm_step = "SLURM_STEP_ID" in variables  # which sets PMI's variables too
    if any(are_set(rank, size) and not (rank == "PMI_RANK" and in_slurm_step) for rank, size, *_ in VARIABLE_FAMILIES):
        return MPIEnvironment
    return SlurmEnvironment if _is_task_of_srun(variables) else PlainEnvironment


def _is_task_of_srun(variables: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one task of a run, which interactive shells are not."""
    step = variables.get("SLURM_STEP_ID") or variables.get("SLURM_STEPID")
    if not step or not variables.get("SLURM_PROCID") or step == _INTERACTIVE_STEP:
        return False
    tasks = variables.get("SLURM_STEP_NUM_TASKS") or variables.get("SLURM_NTASKS")
    if tasks is None:
        return False
    if variables.get("SLURM_JOB_NAME") not in _SHELL_JOB_NAMES:
        return True
    # In the shell that `salloc` opens, `srun -n 4 python train.py` starts four tasks of one run, although the job has
    # the name of the shell. In the shell that `srun --pty bash` opens, a script is one process, which may start others.
    is_the_shell = step == "0" and "SLURM_PTY_PORT" in variables
    return tasks != "1" and not is_the_shell


def rank_of_environment() -> int:
    """Return the rank that the variables of this process give, or 0 if nothing has started it as one rank of several.

    Raises:
        ConfigurationError: a variable is missing or wrong.
    """
    environment = detect_environment()
    return environment.placement().rank if environment.started_processes else 0


def environment_by_name(name: str, variables: Mapping[str, str] | None = None) -> Environment:
    """Return the environment called ``name``, or the detected environment for ``"auto"``.

    Args:
        name: "auto", a built-in name, or a name that a package has registered.
        variables: the variables to read instead of ``os.environ``.

    Raises:
        ConfigurationError: no environment has this name, or its entry point does not return an Environment.
    """
    if name == "auto":
        return detect_environment(variables)
    return _REGISTRY.make(name) if variables is None else _REGISTRY.make(name, variables)


def resolve_environment(setting: str | Environment) -> Environment:
    """Return the environment for ``Fit(environment=...)``, which is an `Environment` or a name."""
    return setting if isinstance(setting, Environment) else environment_by_name(setting)


def check_environment_name(name: object) -> None:
    """Raise an error for an unknown environment name.

    Raises:
        ConfigurationError: no environment has this name. The message suggests the closest known name.
    """
    _REGISTRY.check(name)
