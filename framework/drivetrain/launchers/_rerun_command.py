"""The command that runs this process's script again."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

from drivetrain.errors import ConfigurationError


def rerun_command() -> list[str]:
    """Return the command line that started this script: interpreter, its options, the script or module, arguments.

    ``sys.argv`` is taken as it is now, and so are its consequences: a script that edits it passes on the edited one.

    Raises:
        ConfigurationError: there is no script, or this process does not run it from its start.
    """
    reason = why_not_rerun()
    if reason is not None:
        raise ConfigurationError(
            'launcher="subprocess" cannot run this program again',
            reason,
            'put the program into a file and run that, or use launcher="fork", "forkserver" or "spawn"',
        )
    main = sys.modules["__main__"]
    spec = main.__spec__
    # The interpreter's own options (-X, -W, -O, ...), as multiprocessing finds them for its children.
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if spec is not None and spec.name != "__main__":
        what = ["-m", spec.name.removesuffix(".__main__")]
    elif spec is not None:
        what = [sys.argv[0]]  # A folder or a zip file with a __main__.py.
    else:
        what = [os.path.abspath(str(main.__file__))]
    return [sys.executable, *options, *what, *sys.argv[1:]]


def why_not_rerun() -> str | None:
    """Return why this process's script cannot or should not be run again, or None where it can."""
    if multiprocessing.parent_process() is not None:
        return "this process was started by multiprocessing to run a function, which its script alone does not repeat"
    if not sys.executable:
        return "Python is embedded in another program, and there is no interpreter to start"
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if file is None or not os.path.exists(file):
        how = "python -c" if sys.argv[:1] == ["-c"] else "standard input, a REPL or a notebook"
        return f"it has no file: it comes from {how}"
    from drivetrain.launchers._script_runners import runner  # for whoever starts processes

    running = runner()
    if running is not None:
        return f"{running} runs this code, and would run all else again that it has to run"
    return None
