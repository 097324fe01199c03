"""publish_export: write the file that a function of a library exports, atomically."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from drivetrain._storage.paths import publish


def publish_export(folder: str, name: str, export: Callable[[str], object]) -> str:
    """Write a file as `publish` does, with the content that ``export`` writes to the local path that it receives."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "content")
        export(str(path))
        return publish(folder, name, path.read_bytes())
