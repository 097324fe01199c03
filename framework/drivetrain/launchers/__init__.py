"""How processes start: by running the script again, or a function; on torch's elastic multiprocessing."""

from __future__ import annotations

from drivetrain._distributed.failure import Failure, RankFailedError, first_cause
from drivetrain.launchers._torchrun_variables import suggested_threads
from drivetrain.launchers.choose import LAUNCHERS, Launcher, check_launcher, choose_launcher
from drivetrain.launchers.function_launcher import FunctionLauncher
from drivetrain.launchers.ray_launcher import RayLauncher
from drivetrain.launchers.subprocess_launcher import SubprocessLauncher
from drivetrain.launchers.world import World, current_world

__all__ = [
    "LAUNCHERS",
    "Failure",
    "FunctionLauncher",
    "Launcher",
    "RankFailedError",
    "RayLauncher",
    "SubprocessLauncher",
    "World",
    "check_launcher",
    "choose_launcher",
    "current_world",
    "first_cause",
    "suggested_threads",
]
