"""Environments read the rank and the world size of a process from torchrun, SLURM, MPI, LSF or Kubeflow."""

from __future__ import annotations

from drivetrain.environments.detection import (
    check_environment_name,
    detect_environment,
    environment_by_name,
    resolve_environment,
)
from drivetrain.environments.environment import Environment, Variables
from drivetrain.environments.lsf import LSFEnvironment
from drivetrain.environments.mpi import MPIEnvironment
from drivetrain.environments.placement import Placement
from drivetrain.environments.plain import PlainEnvironment
from drivetrain.environments.slurm import SlurmEnvironment
from drivetrain.environments.torchrun import KubeflowEnvironment, TorchrunEnvironment, torchrun_variables

__all__ = [
    "Environment",
    "KubeflowEnvironment",
    "LSFEnvironment",
    "MPIEnvironment",
    "Placement",
    "PlainEnvironment",
    "SlurmEnvironment",
    "TorchrunEnvironment",
    "Variables",
    "check_environment_name",
    "detect_environment",
    "environment_by_name",
    "resolve_environment",
    "torchrun_variables",
]
