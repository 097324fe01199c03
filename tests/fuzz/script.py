"""Prints a program as a script that runs it."""

from __future__ import annotations

from oracle.program import Program

_SCRIPT = '''\
"""{text}

Run it from the repository's root: .venv/bin/python {name}
"""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = ["tests"]

from oracle.check import check
from oracle.program import *
from worlds import close_worlds

PROGRAM = {program}

if __name__ == "__main__":
    try:
        check(PROGRAM)
        print("Nothing differs.")
    finally:
        close_worlds()
'''


def script(program: Program, text: str, name: str = "program.py") -> str:
    """Return the script; ``text`` describes the finding."""
    escaped = text.replace("\\", "\\\\").replace('"""', "'''")
    return _SCRIPT.format(text=escaped, name=name, program=program)
