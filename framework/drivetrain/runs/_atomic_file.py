"""Write whole files atomically, at a local path or a URL."""

from __future__ import annotations

import os
from contextlib import suppress

from drivetrain.checkpoint._folders import child
from drivetrain.checkpoint._format.folder import as_os_errors
from drivetrain.checkpoint._format.object_file import open_replacement
from drivetrain.checkpoint._format.storage import filesystem_of
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


def replace_file(path: str, content: bytes) -> None:
    """Write a file, so that a reader gets either the previous content or the new content.

    Raises:
        OSError: the file cannot be written.
    """
    filesystem, root = filesystem_of(path)
    if filesystem is not None:
        with as_os_errors(), open_replacement(filesystem, root) as stream:
            stream.write(content)
        return
    temporary = f"{root}.{os.urandom(4).hex()}.new"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # otherwise a crash of the machine could leave an empty file
        os.replace(temporary, root)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
