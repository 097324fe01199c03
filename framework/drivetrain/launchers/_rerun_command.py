"""The command that runs this process's script again, and reasons why the script must not be run again."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from types import FrameType

from drivetrain.errors import ConfigurationError

# A program that runs other code, such as pytest, would repeat all of its work if it were started again for other ranks.
# Maps modules of such programs, which appear on the call stack, to the name of the program.
_CALLER_MODULES = {"_pytest": "pytest", "unittest.case": "unittest", "doctest": "doctest", "nose2": "nose2"}

# Names of such programs, to recognize code that a program runs in another thread. The list also contains servers.
_PROGRAMS = (
    *("pytest", "py.test", "unittest", "nose2", "behave", "asv"),
    *("celery", "gunicorn", "uvicorn", "hypercorn", "flask", "streamlit", "airflow", "luigi"),
    *("gunicorn.app.wsgiapp", "streamlit.web.cli", "celery.bin.celery"),
)


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
    program = runner()
    if program is not None:
        return f"{program} runs this code among other code, which a second start would run again"
    return None


def runner() -> str | None:
    """Return the name of the program that runs this code among other code, such as "pytest"; None for a script."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        program = _CALLER_MODULES.get(name) or _CALLER_MODULES.get(name.partition(".")[0])
        if program is not None:
            return program
        frame = frame.f_back
    program = _program()
    return program if program in _PROGRAMS else None


def _program() -> str:
    """Return the module of ``python -m``, or the file name of the script, with its suffix."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        # The full name is used, because a package of the user may begin with the name of a program, as in
        # `python -m flask.train`.
        return str(spec.name).removesuffix(".__main__")
    return os.path.basename(getattr(main, "__file__", None) or "")
