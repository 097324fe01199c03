"""Which launcher a setting means here, and the registry that finds one by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from drivetrain.errors import ConfigurationError, nearest
from drivetrain.launchers._forking import why_not_fork
from drivetrain.launchers._rerun import why_not_rerun
from drivetrain.launchers.function_launcher import FunctionLauncher
from drivetrain.launchers.launcher import Launcher
from drivetrain.launchers.subprocess_launcher import SubprocessLauncher

ENTRY_POINT_GROUP = "drivetrain.launchers"


def _ray() -> Launcher:
    from drivetrain.launchers.ray_launcher import RayLauncher  # for runs on Ray alone

    return RayLauncher()


# Known without the metadata of installed packages: reading it takes 8 ms, and that of an editable install may be older
# than the code.
_OURS: dict[str, Callable[[], Launcher]] = {
    "subprocess": SubprocessLauncher,
    "spawn": partial(FunctionLauncher, "spawn"),
    "forkserver": partial(FunctionLauncher, "forkserver"),
    "fork": partial(FunctionLauncher, "fork"),
    "ray": _ray,
}

LAUNCHERS = ("auto", *_OURS)
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
    if setting == "auto":
        return None
    check_launcher(setting)
    if setting in _OURS:
        return _OURS[setting]()
    point = _registered(tuple(sys.path))[setting]
    launcher = point.load()()
    if not isinstance(launcher, Launcher):
        raise ConfigurationError(
            f"The launcher {setting!r} ({point.value}) made a {type(launcher).__name__}, which is not a Launcher.",
            "the engine drives launchers through that interface.",
            "make the entry point a callable without arguments that returns a drivetrain.launchers.Launcher.",
        )
    return launcher


def _suitable() -> Launcher:
    """Return what runs a script again, or starts a function where there is no script or too much would run again.

    That is in a notebook, in a REPL and under pytest: forked where that is safe, because only then do functions and
    classes that are defined there, within a test say, exist in the started processes.
    """
    if not is_interactive() and why_not_rerun() is None:
        return SubprocessLauncher()
    return FunctionLauncher("fork" if why_not_fork() is None else "forkserver")


def check_launcher(setting: object) -> None:
    """Refuse the name of a launcher that does not exist. Builds none.

    Raises:
        ConfigurationError: names the nearest that does.
    """
    if isinstance(setting, Launcher) or (isinstance(setting, str) and setting in LAUNCHERS):
        return
    if isinstance(setting, str):
        if setting not in _registered(tuple(sys.path)):
            _registered.cache_clear()  # its package may have been installed since
        if setting in _registered(tuple(sys.path)):
            return
    known = [*LAUNCHERS, *_registered(tuple(sys.path))]
    raise ConfigurationError(
        f"launcher={setting!r} is unknown.{nearest(str(setting), known)}",
        "it names how processes are started; those of other packages are in the entry-point group "
        f"{ENTRY_POINT_GROUP!r}",
        f"one of {', '.join(known)}, or a launcher of your own making, such as RayLauncher(...)",
    )


@cache
def _registered(path: tuple[str, ...]) -> dict[str, Any]:
    """Read what is installed where modules are imported from: once for each such ``path``."""
    from importlib.metadata import entry_points

    points = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name)
    return {point.name: point for point in points if point.name not in LAUNCHERS}


def is_interactive() -> bool:
    """Tell whether somebody types into this process: a notebook, IPython or Python's prompt."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        return True
    return hasattr(sys, "ps1")
