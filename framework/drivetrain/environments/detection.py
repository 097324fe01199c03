"""Detects the environment of this process."""

from __future__ import annotations

import os
from collections.abc import Mapping

from drivetrain._config.entry_points import EntryPointRegistry
from drivetrain.environments.environment import Environment
from drivetrain.environments.kubeflow import KubeflowEnvironment
from drivetrain.environments.lsf import LSFEnvironment
from drivetrain.environments.mpi import MPIEnvironment
from drivetrain.environments.plain import PlainEnvironment
from drivetrain.environments.slurm import SlurmEnvironment
from drivetrain.environments.torchrun import TorchrunEnvironment

# The innermost launcher has precedence: torchrun under srun counts as torchrun, mpirun in a SLURM job as MPI, and jsrun
# also sets variables of Open MPI. Kubeflow's variables are a subset of torchrun's, so it is checked first.
_ENVIRONMENTS: tuple[type[Environment], ...] = (
    KubeflowEnvironment,
    TorchrunEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SlurmEnvironment,
    PlainEnvironment,
)

_NAMES = EntryPointRegistry[Environment](
    "environment",
    "drivetrain.environments",
    Environment,  # type: ignore[type-abstract]
    {kind.name: kind for kind in _ENVIRONMENTS},
    why="it names what started the processes",
    instead="an Environment object",
)


def detect_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Return the built-in environment that this process is in.

    Args:
        variables: used instead of ``os.environ``.
    """
    variables = os.environ if variables is None else variables
    return next(kind(variables) for kind in _ENVIRONMENTS if kind.detect(variables))


def environment_by_name(name: str, variables: Mapping[str, str] | None = None) -> Environment:
    """Return the environment called ``name``, or the detected one for ``"auto"``.

    Args:
        name: "auto", a built-in name, or one that a package has registered.
        variables: used instead of ``os.environ``.

    Raises:
        ConfigurationError: no environment has this name, or its entry point does not return an Environment.
    """
    if name == "auto":
        return detect_environment(variables)
    return _NAMES.make(name) if variables is None else _NAMES.make(name, variables)


def check_environment_name(name: object) -> None:
    """Raise an error for an unknown environment name.

    Raises:
        ConfigurationError: suggests the closest known name.
    """
    _NAMES.check(name)
