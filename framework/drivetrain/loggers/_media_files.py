"""MediaFiles: store media in the run's folder as ``media/<key>/step=<n>.<kind>``."""

from __future__ import annotations

import re

from drivetrain._storage.paths import publish
from drivetrain.runs._directory import RunDirectory

_FOLDER = "media"
_UNSAFE = re.compile(r"[^\w.@+= -]")
_STEP = re.compile(r"/step=(\d+)\.\w+$")


class MediaFiles:
    """Writes media files by key and step below a run's directory.

    Args:
        directory: the run's directory.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def write(self, key: str, step: int, kind: str, content: bytes) -> None:
        """Write a file, replacing a file of the same key and step.

        Args:
            key: the name of the media. Slashes separate folders, and characters that are unsafe in file names become
                underscores.
            step: the optimizer step.
            kind: the file's extension, without a dot.
            content: the file's content.
        """
        parts = [_UNSAFE.sub("_", part) for part in key.split("/")]
        folder = "/".join([_FOLDER, *(part if part.strip(".") else "_" * max(1, len(part)) for part in parts)])
        publish(self._directory.make(), f"{folder}/step={step}.{kind}", content)

    def rewind(self, step: int) -> None:
        """Remove the files of steps after ``step``."""
        folder = self._directory.folder
        for path in folder.find(_FOLDER):
            match = _STEP.search(path)
            if match is not None and int(match[1]) > step:
                folder.remove(path)
