"""Which launcher a setting means here, and the registry that finds one by name."""

from __future__ import annotations

import sys
from functools import partial

from drivetrain._config.entry_points import Names
from drivetrain.errors import ConfigurationError
from drivetrain.launchers._fork_safety import why_not_fork
from drivetrain.launchers._rerun_command import why_not_rerun
from drivetrain.launchers.function_launcher import FunctionLauncher
from drivetrain.launchers.launcher import Launcher
from drivetrain.launchers.subprocess_launcher import SubprocessLauncher


def _ray() -> Launcher:
    from drivetrain.launchers.ray_launcher import RayLauncher  # for runs on Ray alone

    return RayLauncher()


_NAMES = Names[Launcher](
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
    why="it names how processes are started",
    instead="a launcher of your own making, such as RayLauncher(...)",
)

LAUNCHERS = _NAMES.ours
"""The names that come with drivetrain."""


def choose_launcher(setting: str | Launcher, num_local: int) -> Launcher:
    """Return the launcher for the setting ``Fit(launcher=...)``, once it is known that processes are to be started.

    Args:
        setting: "auto", a name, or a launcher, which is returned.
        num_local: how many processes this node shall have.

    Raises:
        ConfigurationError: there is no such launcher, or it cannot work here; with the reason.
    """
    launcher = named_launcher(setting) or _suitable()
    launcher.check(num_local)
    return launcher


def named_launcher(setting: str | Launcher) -> Launcher | None:
    """Return the launcher that a setting names, or is, whether it can work here or not; None for "auto".

    Raises:
        ConfigurationError: nobody registered the name, or what is registered makes no launcher.
    """
    if isinstance(setting, Launcher):
        return setting
    return None if setting == "auto" else _NAMES.make(setting)


def _suitable() -> Launcher:
    """Return what runs a script again, or starts a function where there is no script or too much would run again.

    That is in a notebook, in a REPL and under pytest: forked where that is safe, because only then do functions and
    classes that are defined there, within a test say, exist in the started processes.

    Raises:
        ConfigurationError: this is a worker of Ray's.
    """
    if _is_a_worker_of_ray():
        raise ConfigurationError(
            "several devices were asked for in a task or an actor of Ray, such as a trial of Ray Tune",
            "to run a worker's program again ends it as an actor, and a fork of it waits for threads that it lacks",
            "use one device in each (Fit(devices=1)), or call fit in the driver, with launcher='ray'",
        )
    if not is_interactive() and why_not_rerun() is None:
        return SubprocessLauncher()
    return FunctionLauncher("fork" if why_not_fork() is None else "forkserver")


def check_launcher(setting: object) -> None:
    """Refuse the name of a launcher that does not exist. Builds none.

    Raises:
        ConfigurationError: names the nearest that does.
    """
    if not isinstance(setting, Launcher):
        _NAMES.check(setting)


def is_interactive() -> bool:
    """Tell whether somebody types into this process: a notebook, IPython or Python's prompt."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        return True
    return hasattr(sys, "ps1")


def _is_a_worker_of_ray() -> bool:
    """Tell whether Ray runs this code for a task or an actor, as opposed to a script that uses Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_task_id() is not None
