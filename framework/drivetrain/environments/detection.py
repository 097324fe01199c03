"""Which environment this process is in."""

from __future__ import annotations

import os
from collections.abc import Mapping

from drivetrain._config.entry_points import Names
from drivetrain.environments.environment import Environment
from drivetrain.environments.kubeflow import KubeflowEnvironment
from drivetrain.environments.lsf import LSFEnvironment
from drivetrain.environments.mpi import MPIEnvironment
from drivetrain.environments.plain import PlainEnvironment
from drivetrain.environments.slurm import SlurmEnvironment
from drivetrain.environments.torchrun import TorchrunEnvironment

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

_NAMES = Names[Environment](
    "environment",
    "drivetrain.environments",
    Environment,  # type: ignore[type-abstract]
    {kind.name: kind for kind in _ENVIRONMENTS},
    why="it names who started the processes",
    instead="an Environment of your own",
)


def detect_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Return the environment that this process is in, of those that come with drivetrain.

    Args:
        variables: in place of ``os.environ``.
    """
    variables = os.environ if variables is None else variables
    return next(kind(variables) for kind in _ENVIRONMENTS if kind.detect(variables))


def environment_by_name(name: str, variables: Mapping[str, str] | None = None) -> Environment:
    """Return the environment called ``name``, or the one detected for ``"auto"``.

    Args:
        name: "auto", one of ours, or one that a package has registered.
        variables: in place of ``os.environ``.

    Raises:
        ConfigurationError: there is none of that name, or what is registered makes no environment.
    """
    if name == "auto":
        return detect_environment(variables)
    return _NAMES.make(name) if variables is None else _NAMES.make(name, variables)


def check_environment_name(name: object) -> None:
    """Refuse a name that no environment has.

    Raises:
        ConfigurationError: names the nearest that one has.
    """
    _NAMES.check(name)
