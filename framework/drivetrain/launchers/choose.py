"""Which launcher a setting means here."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from drivetrain.errors import ConfigurationError, nearest
from drivetrain.launchers._rerun import why_not_rerun
from drivetrain.launchers.function_launcher import FunctionLauncher
from drivetrain.launchers.ray_launcher import RayLauncher
from drivetrain.launchers.subprocess_launcher import SubprocessLauncher

Launcher = SubprocessLauncher | FunctionLauncher | RayLauncher
LAUNCHERS = ("auto", "subprocess", "spawn", "forkserver", "fork", "ray")


def choose_launcher(setting: str | Launcher, num_local: int) -> Launcher:
    """Return the launcher for the setting ``Fit(launcher=...)``.

    "auto" runs a script again, and starts a function where there is no script, from a notebook or a REPL, or where more
    than a script would run again, under pytest: forked where that is safe, because only then do functions and classes
    that are defined there, within a test say, exist in the started processes.

    Args:
        setting: one of `LAUNCHERS`, or a launcher, which is returned.
        num_local: how many processes this node shall have, for the error.

    Raises:
        ConfigurationError: there is no such launcher, or it cannot work here; with the reason.
    """
    if isinstance(setting, Launcher):
        return setting
    if setting == "auto":
        if not is_interactive() and why_not_rerun() is None:
            return SubprocessLauncher()
        return FunctionLauncher("fork" if why_not_fork() is None else "forkserver")
    if setting == "subprocess":
        return SubprocessLauncher()
    if setting == "ray":
        return RayLauncher()
    if setting == "spawn" or setting == "forkserver":
        return FunctionLauncher("spawn" if setting == "spawn" else "forkserver")
    if setting == "fork":
        reason = why_not_fork()
        if reason is not None:
            raise ConfigurationError(
                f'launcher="fork" cannot start {num_local} processes here',
                reason,
                'use launcher="forkserver", with what you defined moved into a module; or fork before that is used',
            )
        return FunctionLauncher("fork")
    raise _unknown(setting)


def check_launcher(setting: object) -> None:
    """Refuse the name of a launcher that does not exist.

    Raises:
        ConfigurationError: names the nearest that does.
    """
    if not isinstance(setting, Launcher) and setting not in LAUNCHERS:
        raise _unknown(setting)


def _unknown(setting: object) -> ConfigurationError:
    return ConfigurationError(
        f"launcher={setting!r} is unknown.{nearest(str(setting), LAUNCHERS)}",
        "it names how processes are started",
        f"one of {', '.join(LAUNCHERS)}, or a launcher of your own making, such as RayLauncher(...)",
    )


def is_interactive() -> bool:
    """Tell whether somebody types into this process: a notebook, IPython or Python's prompt."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        return True
    return hasattr(sys, "ps1")


def why_not_fork() -> str | None:
    """Return why a copy of this process could not compute, or None where it could."""
    if sys.platform in ("darwin", "win32"):
        return f"on {sys.platform} a forked copy of a process that uses the system's frameworks is unsafe or impossible"
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if in_use:
        return "this process has used CUDA, which does not work in a forked copy"
    if torch.xpu.is_initialized():  # type: ignore[no-untyped-call]
        return "this process has used an XPU, which does not work in a forked copy"
    if _has_threads_of("pt_autograd"):
        return "a backward has started threads of autograd's for the accelerators, which a forked copy lacks"
    if dist.is_available() and dist.is_initialized():
        return "this process has a process group, whose threads and connections a forked copy lacks"
    return None


def _has_threads_of(name: str) -> bool:
    """Whether this process has a thread whose name begins so, where the operating system tells."""
    for file in Path("/proc/self/task").glob("*/comm"):
        try:
            if file.read_text().startswith(name):
                return True
        except OSError:  # it has ended meanwhile
            continue
    return False
