"""Which environment this process is in."""

from __future__ import annotations

import os
from collections.abc import Mapping

from drivetrain.environments.environment import Environment
from drivetrain.environments.kubeflow import KubeflowEnvironment
from drivetrain.environments.lsf import LSFEnvironment
from drivetrain.environments.mpi import MPIEnvironment
from drivetrain.environments.plain import PlainEnvironment
from drivetrain.environments.slurm import SlurmEnvironment
from drivetrain.environments.torchrun import TorchrunEnvironment
from drivetrain.errors import ConfigurationError, nearest

# The innermost launcher comes first: torchrun under srun is torchrun's, mpirun in a SLURM job is MPI's, and jsrun sets
# some of Open MPI's variables. Kubeflow's are a part of torchrun's, so that it is asked before.
_ENVIRONMENTS: tuple[type[Environment], ...] = (
    KubeflowEnvironment,
    TorchrunEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SlurmEnvironment,
    PlainEnvironment,
)


def detect_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Return the environment that this process is in.

    Args:
        variables: in place of ``os.environ``.
    """
    variables = os.environ if variables is None else variables
    return next(kind(variables) for kind in _ENVIRONMENTS if kind.detect(variables))


def environment_by_name(name: str, variables: Mapping[str, str] | None = None) -> Environment:
    """Return the environment called ``name``, or the one detected for ``"auto"``.

    Raises:
        ConfigurationError: there is none of that name.
    """
    check_environment_name(name)
    if name == "auto":
        return detect_environment(variables)
    return next(kind for kind in _ENVIRONMENTS if kind.name == name)(variables)


def check_environment_name(name: object) -> None:
    """Refuse a name that no environment has.

    Raises:
        ConfigurationError: names the nearest that one has.
    """
    known = ["auto", *(kind.name for kind in _ENVIRONMENTS)]
    if name not in known:
        raise ConfigurationError(
            f"environment={name!r} is unknown.{nearest(str(name), known)}",
            "it names who started the processes",
            f"one of {', '.join(known)}, or an Environment of your own",
        )
