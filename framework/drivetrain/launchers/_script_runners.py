"""Programs that run code of others: to run such a program again repeats far more than the code that asked for it."""

from __future__ import annotations

import os
import sys
from types import FrameType

# By a module of theirs that calls a test.
_CALLERS = {"_pytest": "pytest", "unittest.case": "unittest", "doctest": "doctest", "nose2": "nose2"}

# By the program's name, for code that they call from a thread of their own, and servers.
_PROGRAMS = (
    *("pytest", "py.test", "unittest", "nose2", "behave", "asv"),
    *("celery", "gunicorn", "uvicorn", "hypercorn", "flask", "streamlit", "airflow", "luigi"),
    *("gunicorn.app.wsgiapp", "streamlit.web.cli", "celery.bin.celery"),
)


def runner() -> str | None:
    """Return the name of the program that runs this code among other code, such as "pytest"; None for a script."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        found = _CALLERS.get(name) or _CALLERS.get(name.partition(".")[0])
        if found is not None:
            return found
        frame = frame.f_back
    program = _program()
    return program if program in _PROGRAMS else None


def _program() -> str:
    """Return what ``python -m`` was given, or the name of the file that Python runs, with its suffix."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        # Whole, because a package of the user's may be called like a program: `python -m flask.train`.
        return str(spec.name).removesuffix(".__main__")
    return os.path.basename(getattr(main, "__file__", None) or "")
