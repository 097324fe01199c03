"""Detects programs that run other code, such as pytest.

A launcher must not start such a program again for other ranks, because the program would repeat all of its work.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

# Maps modules of such programs, which appear on the call stack, to the name of the program.
_CALLER_MODULES = {"_pytest": "pytest", "unittest.case": "unittest", "doctest": "doctest", "nose2": "nose2"}

# Names of such programs, to recognize code that a program runs in another thread. The list also contains servers.
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
