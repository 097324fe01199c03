"""publish: write a profiler's files atomically."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from drivetrain.checkpoint._folders import child
from drivetrain.runs._atomic_file import replace_file
from drivetrain.runs._directory import make_directory


def publish(folder: str, name: str, content: bytes) -> str:
    """Write a file, replacing a file of the same name, and return its path or URL.

    Args:
        folder: a path or URL, which is created if necessary.
        name: the file's name, which may contain folders.
        content: the content.

    Raises:
        OSError: writing failed.
    """
    path = child(folder, name)
    make_directory(path.rpartition("/")[0])
    replace_file(path, content)
    return path


def publish_export(folder: str, name: str, export: Callable[[str], object]) -> str:
    """Write a file as `publish` does, with the content that ``export`` writes to the local path that it receives."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "content")
        export(str(path))
        return publish(folder, name, path.read_bytes())
