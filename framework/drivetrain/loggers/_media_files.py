"""Media in a logger's folder, as files ``media/<key>/step=<n>.<kind>``."""

from __future__ import annotations

import re

from drivetrain._storage.paths import folder_at, publish

_FOLDER = "media"
_UNSAFE = re.compile(r"[^\w.@+= -]")
_STEP = re.compile(r"/step=(\d+)\.\w+$")


def write_media(folder: str, key: str, step: int, kind: str, content: bytes) -> None:
    """Write a media file, replacing a file of the same key and step.

    Args:
        folder: the logger's folder, a path or URL.
        key: the name of the media. Slashes separate folders, and characters that are unsafe in file names become
            underscores.
        step: the optimizer step.
        kind: the file's extension, without a dot.
        content: the file's content.
    """
    parts = [_UNSAFE.sub("_", part) for part in key.split("/")]
    path = "/".join([_FOLDER, *(part if part.strip(".") else "_" * max(1, len(part)) for part in parts)])
    publish(folder, f"{path}/step={step}.{kind}", content)


def remove_media_after(folder: str, step: int) -> None:
    """Remove the media files of steps after ``step``."""
    files = folder_at(folder)
    for path in files.find(_FOLDER):
        match = _STEP.search(path)
        if match is not None and int(match[1]) > step:
            files.remove(path)
