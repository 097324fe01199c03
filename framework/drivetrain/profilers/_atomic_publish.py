"""publish: write a profiler's files atomically."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from drivetrain.checkpoint._folders import child
from drivetrain.checkpoint._format.storage import filesystem_of
from drivetrain.runs._directory import make_directory


def publish(folder: str, name: str, content: bytes | Path) -> str:
    """Write a file, replacing a file of the same name, and return its path or URL.

    Args:
        folder: a path or URL, which is created if necessary.
        name: the file's name.
        content: the content, or the path of a local file with the content.

    Raises:
        OSError: writing failed.
    """
    path = child(folder, name)
    make_directory(path.rpartition("/")[0])  # The name may contain folders.
    filesystem, root = filesystem_of(path)
    if filesystem is not None:  # Object stores write atomically.
        if isinstance(content, Path):
            filesystem.put_file(str(content), root)
        else:
            filesystem.pipe_file(root, content)
        return path
    temporary = f"{root}.{os.urandom(4).hex()}.new"
    try:
        with open(temporary, "wb") as file:
            if isinstance(content, Path):
                with content.open("rb") as source:
                    while chunk := source.read(2**20):
                        file.write(chunk)
            else:
                file.write(content)
        os.replace(temporary, root)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return path
