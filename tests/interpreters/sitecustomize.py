"""Python imports this as it starts, in every process that a test starts: it has tests/conftest.py's PYTHONPATH.

torch and torch._dynamo are some hundred thousand objects that live as long as the process. Looking for garbage among
them while they are imported, and again as Python ends, takes two fifths of the processor time of a script that imports
them and does nothing else (1.2 s of 3.0 s).
"""

from __future__ import annotations

import atexit
import gc

gc.set_threshold(50_000, 10, 10)
atexit.register(gc.freeze)
