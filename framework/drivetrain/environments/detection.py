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

# All environments, in the order of detection. The innermost launcher has precedence: torchrun under srun counts as
# torchrun, and mpirun in a SLURM job counts as MPI. LSF comes before MPI because jsrun also sets variables of Open MPI.
# Kubeflow comes first because its variables are a subset of the variables of torchrun.
_ENVIRONMENTS: tuple[type[Environment], ...] = (
    KubeflowEnvironment,
    TorchrunEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SlurmEnvironment,
    PlainEnvironment,
)

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
    return next(kind(variables) for kind in _ENVIRONMENTS if kind.detect(variables))


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
