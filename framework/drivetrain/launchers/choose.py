"""Chooses the launcher for `Fit(launcher=...)`, and registers launchers by name."""

from __future__ import annotations

import sys
from functools import partial

from drivetrain._config.entry_points import EntryPointRegistry
from drivetrain.errors import ConfigurationError
from drivetrain.launchers._fork_safety import why_not_fork
from drivetrain.launchers._rerun_command import why_not_rerun
from drivetrain.launchers.function_launcher import FunctionLauncher
from drivetrain.launchers.launcher import Launcher
from drivetrain.launchers.subprocess_launcher import SubprocessLauncher


def _ray() -> Launcher:
    from drivetrain.launchers.ray_launcher import RayLauncher  # imported only for runs on Ray

    return RayLauncher()


_REGISTRY = EntryPointRegistry[Launcher](
    "launcher",
    "drivetrain.launchers",
    Launcher,
    {
        "subprocess": SubprocessLauncher,
        "spawn": partial(FunctionLauncher, "spawn"),
        "forkserver": partial(FunctionLauncher, "forkserver"),
        "fork": partial(FunctionLauncher, "fork"),
        "ray": _ray,
    },
    meaning="the name selects how the processes of a run are started",
    alternatives="a Launcher object, such as RayLauncher(...)",
)


def choose_launcher(setting: str | Launcher, num_local: int) -> Launcher:
    """Return the launcher for ``Fit(launcher=setting)``, for a run that has to start processes.

    Args:
        setting: "auto", the name of a launcher, or a launcher object, which is returned unchanged.
        num_local: the number of processes on this node.

    Raises:
        ConfigurationError: no launcher has this name, or the launcher cannot work in this process.
    """
    launcher = named_launcher(setting) or _choose_automatically()
    launcher.check(num_local)
    return launcher


def named_launcher(setting: str | Launcher) -> Launcher | None:
    """Return ``setting`` if it is a launcher, the launcher with this name, or None for "auto".

    `Launcher.check` is not called.

    Raises:
        ConfigurationError: no launcher has this name, or its entry point does not return a launcher.
    """
    if isinstance(setting, Launcher):
        return setting
    return None if setting == "auto" else _REGISTRY.make(setting)


def _choose_automatically() -> Launcher:
    """Return a launcher that runs the script again, or a `FunctionLauncher` if the script cannot be run again.

    A `FunctionLauncher` is for notebooks, REPLs and pytest. The launcher forks if forking is safe, because functions
    and classes that are defined in a notebook or a REPL exist only in forked processes.

    Raises:
        ConfigurationError: this process is a Ray worker.
    """
    if _is_ray_worker():
        raise ConfigurationError(
            "a task or actor of Ray, such as a trial of Ray Tune, requests several devices",
            "the script of a Ray worker cannot be run again, and a forked copy of the worker would deadlock",
            "use one device in each task or actor (Fit(devices=1)), or call fit in the driver, with launcher='ray'",
        )
    if not is_interactive() and why_not_rerun() is None:
        return SubprocessLauncher()
    return FunctionLauncher("fork" if why_not_fork() is None else "forkserver")


def check_launcher(setting: object) -> None:
    """Raise an error for an unknown launcher name, without constructing a launcher.

    Raises:
        ConfigurationError: no launcher has this name. The message suggests the closest known name.
    """
    if not isinstance(setting, Launcher):
        _REGISTRY.check(setting)


def is_interactive() -> bool:
    """Return True in a notebook, IPython or Python's prompt."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        return True
    return hasattr(sys, "ps1")


def _is_ray_worker() -> bool:
    """Return True inside a Ray task or actor, False in a script that uses Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_task_id() is not None
