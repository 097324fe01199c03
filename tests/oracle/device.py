"""The device on which programs run: the CPU, or the one that `make cuda` requests by an environment variable."""

from __future__ import annotations

import os

DEVICE = os.environ.get("PARITY_DEVICE", "cpu")
"""The kind of device of the engine and of the interpreter."""
