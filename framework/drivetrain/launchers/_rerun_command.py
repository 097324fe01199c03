"""The command that runs this process's script again."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

from drivetrain.errors import ConfigurationError


def rerun_command() -> list[str]:
    """Return the command line that runs this script again.

    The command line consists of the interpreter, the options of the interpreter, the script or module, and the current
    arguments in ``sys.argv``. A script that has edited ``sys.argv`` passes on the edited arguments.

    Raises:
        ConfigurationError: there is no script, or running the script again would not repeat this process's work.
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
    # These are the options of the interpreter (-X, -W, -O, ...) that multiprocessing passes to its children.
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if spec is not None and spec.name != "__main__":
        target = ["-m", spec.name.removesuffix(".__main__")]
    elif spec is not None:
        target = [sys.argv[0]]  # a folder or zip file with a __main__.py
    else:
        target = [os.path.abspath(str(main.__file__))]
    return [sys.executable, *options, *target, *sys.argv[1:]]


def why_not_rerun() -> str | None:
    """Return why the script of this process cannot or should not be run again, or None if it can be run again."""
    if multiprocessing.parent_process() is not None:
        return "multiprocessing started this process to call a function, which running the script again would not call"
    if not sys.executable:
        return "Python is embedded in another program, and there is no interpreter to start"
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if file is None or not os.path.exists(file):
        source = "python -c" if sys.argv[:1] == ["-c"] else "standard input, a REPL or a notebook"
        return f"the program has no file: it comes from {source}"
    from drivetrain.launchers._script_runners import runner  # imported only to start processes

    program = runner()
    if program is not None:
        return f"{program} runs this code among other code, which a second start would run again"
    return None
