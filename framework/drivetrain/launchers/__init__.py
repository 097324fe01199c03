"""Launchers start the processes of a run: by running the script again, by calling a function, or on Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._distributed.child_processes import suggested_threads
from drivetrain._distributed.failure import Failure, RankFailedError, first_cause
from drivetrain._runtime.accelerators import Devices
from drivetrain._runtime.lazy_names import lazy_names
from drivetrain.environments import torchrun_variables
from drivetrain.launchers.choose import check_launcher, choose_launcher, named_launcher
from drivetrain.launchers.function_launcher import FunctionLauncher
from drivetrain.launchers.launched_processes import LaunchedProcesses, current_processes
from drivetrain.launchers.launcher import Launcher
from drivetrain.launchers.subprocess_launcher import SubprocessLauncher

if TYPE_CHECKING:
    from drivetrain.launchers.ray_launcher import RayLauncher

__all__ = [
    "Devices",
    "Failure",
    "FunctionLauncher",
    "LaunchedProcesses",
    "Launcher",
    "RankFailedError",
    "RayLauncher",
    "SubprocessLauncher",
    "check_launcher",
    "choose_launcher",
    "current_processes",
    "first_cause",
    "named_launcher",
    "suggested_threads",
    "torchrun_variables",
]

__getattr__, *_ = lazy_names(__name__, {"RayLauncher": ".ray_launcher"})  # imported only for runs on Ray
